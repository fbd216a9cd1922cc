"""Wrong inputs for every way into titanlite, drawn from a seed, and one judge for all of them."""
