"""Wrong inputs for every entry point of titanlite, drawn from a seed, and one judge for all of them."""
