"""The combinations of meshes, models and options that are trained and compared: a table in which every pair of values occurs.

    python -m tests.distributed.cover [--strength 2] [--seed 3] [--all]

prints the table. Every supported pair of values is in at least one cell, found greedily with a seed (Cohen et al., "The AETG
System", IEEE TSE 1997). Among cells that cover equally much, the cheapest is taken: compiled cells and cells on eight ranks
cost several times as much as others.
"""

import argparse
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

Cell = dict[str, str]  # factor -> value
Values = frozenset[tuple[str, str]]  # some factors and their values

# The first value of each factor is the plain one; the cell of plain values is the reference.
FACTORS: dict[str, tuple[str, ...]] = {
    "mesh": (
        "one process", "shard 2", "shard 4", "replicate 2", "tp 2", "tp 4", "replicate 2 x shard 2", "shard 2 x tp 2",
        "replicate 2 x tp 2", "context 2", "context 4", "context 2 x tp 2", "shard 2 x context 2", "replicate 2 x context 2",
        "replicate 2 x shard 2 x tp 2", "shard 2 x context 2 x tp 2", "context 8",
        "pipeline 2", "pipeline 4", "pipeline 2 x shard 2", "pipeline 2 x tp 2", "pipeline 2 x replicate 2",
        "pipeline 2 x context 2",
    ),
    "family": ("Llama 3", "Llama 3 tied", "Llama 3 of 515 tokens", "Qwen 3", "Qwen 2", "Gemma 3", "Gemma 2", "OLMo 2",
        "Mixture"),
    "blocks": ("few", "4"),
    "compile": ("no", "blocks"),
    "recompute": ("none", "full", "full by chunks", "every second layer", "per operation", "budget"),
    "precision": ("float32", "bfloat16", "float8", "float8 rows", "float8 gather", "bfloat16 states"),
    "accumulation": ("1", "2", "2, reduced at the end", "4"),
    "documents": ("one", "many"),
    "adapter": ("none", "lora"),
    "gather": ("default", "never", "always", "two", "prefetch"),
    "method": ("keys gathered", "heads exchanged"),  # of context parallelism
    "optimizer": ("AdamW", "Muon"),
    "z-loss": ("none", "0.001"),
    "validation": ("none", "before and after"),
    # of pipelines
    "schedule": ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS"),
    "stages": ("equal", "3 blocks and 1"),
    # of MoE models
    "router": ("softmax", "sigmoid, bias, shared", "grouped"),
    "experts": ("whole", "split 2", "split 4"),
    "received": ("in one round", "in several rounds"),
    "balance": ("none", "losses", "moving bias"),
}  # fmt: skip
OF_MIXTURES = ("router", "experts", "received", "balance")


EIGHT_RANKS = frozenset({"replicate 2 x shard 2 x tp 2", "shard 2 x context 2 x tp 2", "context 8"})
OTHER_FLOAT8 = frozenset({"float8 rows", "float8 gather"})  # test_low_precision.py has some meshes of each, a campaign all
# meshes whose ranks of a replica 4 divides
FOUR = "shard 4|tp 4|context [48]|shard 2 x tp 2|shard 2 x context 2|context 2 x tp 2"
PIPELINES = frozenset(mesh for mesh in FACTORS["mesh"] if "pipeline" in mesh)
SEVERAL_STAGES = frozenset({"Interleaved1F1B", "LoopedBFS"})  # on each rank
# of pipelines, only "pipeline 2" under "1F1B" and "Interleaved1F1B" is in `make test`
OTHER_PIPELINES = (PIPELINES - {"pipeline 2"}) | frozenset(FACTORS["schedule"][2:]) | {"3 blocks and 1", "bfloat16 states"}
# in no table of `make test`
LATER = EIGHT_RANKS | OTHER_FLOAT8 | OTHER_PIPELINES | {"context 4", "replicate 2 x context 2"}
SEED = 4  # the cheapest of the seeds below 20, which saves 5%
PLAIN: Cell = {factor: values[0] for factor, values in FACTORS.items()}


class Refusal(NamedTuple):
    """A combination that titanlite refuses, or that tests nothing."""

    factors: tuple[str, ...]
    holds: Callable[..., bool]  # of these factors' values
    reason: str


REFUSALS = (
    Refusal(("compile", "recompute"), lambda c, r: c == "no" and r == "budget", "the compiler chooses what to keep"),
    Refusal(("recompute", "mesh"), lambda r, m: "chunks" in r and "tp" in m, "each rank has all tokens, of some features"),
    Refusal(("recompute", "precision"), lambda r, p: "chunks" in r and "float8" in p, "parts of no multiple of 16 tokens"),
    Refusal(("precision", "adapter"), lambda p, a: "float8" in p and a == "lora", "adapters do not multiply in float8"),
    Refusal(("precision", "mesh"), lambda p, m: "gather" in p and "tp" in m, "the scale of a part of a weight is another"),
    Refusal(("precision", "gather"), lambda p, g: p == "float8 gather" and g == "two", "float8 gathers all or nothing again"),
    Refusal(("gather", "mesh"), lambda g, m: g != "default" and not re.search("shard|context", m), "nothing is gathered"),
    Refusal(
        ("gather", "mesh"),
        lambda g, m: g == "two" and not re.search("shard 4|context [48]|shard 2 x context 2$", m),
        "2 does not divide the shards",
    ),
    Refusal(("method", "mesh"), lambda o, m: o == "heads exchanged" and "context" not in m, "sequences are not split"),
    Refusal(("method", "mesh"), lambda o, m: o == "heads exchanged" and m == "context 8", "there are 4 key-value heads"),
    *(
        Refusal(("mesh", factor), lambda m, v, plain=plain: m not in PIPELINES and v != plain, "there are no stages")
        for factor, (plain, *_) in FACTORS.items()
        if factor in ("schedule", "stages")
    ),
    Refusal(("mesh", "blocks"), lambda m, b: (m in PIPELINES) == (b == "few"), "each stage needs a block, and few are faster"),
    Refusal(("mesh", "schedule", "blocks"), lambda m, k, b: m == "pipeline 4" and k in SEVERAL_STAGES and b == "4",
            "4 blocks are no 8 stages"),
    Refusal(("mesh", "stages"), lambda m, s: m == "pipeline 4" and s != "equal", "each stage has one block"),
    Refusal(("schedule", "stages"), lambda k, s: k in SEVERAL_STAGES and s != "equal", "each stage has one block"),
    Refusal(("mesh", "accumulation"), lambda m, a: m in PIPELINES and "end" in a, "a pipeline reduces once a step"),
    Refusal(("mesh", "accumulation"), lambda m, a: m not in PIPELINES and a == "4", "no more than 2 show"),
    Refusal(("mesh", "accumulation"), lambda m, a: m in PIPELINES and int(a[0]) < int(m[9]), "fewer microbatches than ranks"),
    Refusal(("mesh", "gather"), lambda m, g: m in PIPELINES and g in ("always", "two"), "what is gathered stays"),
    Refusal(("schedule", "compile"), lambda k, c: "Zero" in k and c != "no", "compiled graphs have one backward pass"),
    Refusal(("schedule", "recompute"), lambda k, r: "Zero" in k and r != "none", "what is computed again is kept"),
    Refusal(("precision", "mesh"), lambda p, m: p == "bfloat16 states" and m not in PIPELINES,
            "test_low_precision.py has other meshes"),
    Refusal(("adapter", "optimizer"), lambda a, o: a == "lora" and o == "Muon", "adapters are no matrices for Muon"),
    *(
        Refusal(("family", factor), lambda f, v, plain=plain: f != "Mixture" and v != plain, "there are no experts")
        for factor, (plain, *_) in FACTORS.items()
        if factor in OF_MIXTURES
    ),
    Refusal(("family", "precision"), lambda f, p: f == "Mixture" and p != "float32", "rounding can change a choice"),
    Refusal(("family", "router", "recompute"), lambda f, r, c: f == "Mixture" and "shared" not in r and "chunks" in c,
            "nothing is computed by chunks"),
    Refusal(("router", "balance"), lambda r, b: b == "moving bias" and "bias" not in r, "there is no bias"),
    Refusal(("experts", "received"), lambda e, r: e == "whole" and r != "in one round", "no tokens are dispatched"),
    Refusal(("experts", "gather"), lambda e, g: e != "whole" and g == "two", "FSDP2 reshards a block over the same ranks"),
    Refusal(("experts", "mesh"), lambda e, m: e != "whole" and not re.search("shard|tp|context", m), "there is one rank"),
    Refusal(("experts", "mesh"), lambda e, m: e == "split 4" and not re.search(FOUR, m), "4 does not divide the ranks"),
)  # fmt: skip


_PLACES = {factor: place for place, factor in enumerate(FACTORS)}
# the refusals of each factor, with the positions of their factors
_REFUSALS_AT = [
    [(refusal.holds, [_PLACES[each] for each in refusal.factors]) for refusal in REFUSALS if factor in refusal.factors]
    for factor in FACTORS
]


def allowed(cell: Cell) -> bool:
    """Whether titanlite supports these values; missing factors are ignored."""
    values = _in_order(cell)
    return all(_taken(values, place) for place, value in enumerate(values) if value)


def possible(cell: Cell, without: frozenset[str] = frozenset(), factor: str | None = None) -> bool:
    """Whether these values can be completed by values of the other factors, none of `without`.

    factor: the only one that needs to be checked against the others.
    """
    values = _in_order(cell)
    taken = allowed(cell) if factor is None else _taken(values, _PLACES[factor])
    return taken and without.isdisjoint(values) and _completes(values, without)


def _in_order(cell: Cell) -> tuple[str, ...]:
    """The values of all factors, "" for those that are missing."""
    return tuple(cell.get(factor, "") for factor in FACTORS)


def _taken(values: tuple[str, ...], place: int) -> bool:
    """Whether no refusal of the factor at this position holds."""
    for holds, places in _REFUSALS_AT[place]:
        given = [values[each] for each in places]
        if all(given) and holds(*given):
            return False
    return True


@functools.cache
def _completes(values: tuple[str, ...], without: frozenset[str]) -> bool:
    """Whether allowed values can be completed."""
    if "" not in values:
        return True
    place = values.index("")
    choices = (value for value in FACTORS[[*FACTORS][place]] if value not in without)
    every = ((*values[:place], value, *values[place + 1 :]) for value in choices)
    return any(_taken(more, place) and _completes(more, without) for more in every)


def parts(cell: Cell, strength: int, factor: str | None = None) -> Iterator[Values]:
    """The combinations of `strength` values that a cell tests: in low precision, where rounding hides much, only those with it.

    factor: only those with its value.
    """
    exact, precision = cell["precision"] == PLAIN["precision"], ("precision", cell["precision"])
    if factor is None:
        every = itertools.combinations(cell.items(), strength)
    else:
        given = (factor, cell[factor])
        others = (item for item in cell.items() if item != given)
        every = ((given, *chosen) for chosen in itertools.combinations(others, strength - 1))
    return (frozenset(chosen) for chosen in every if exact or precision in chosen)


@functools.cache
def every_part(strength: int, without: frozenset[str] = frozenset()) -> set[Values]:
    """All combinations of `strength` values that occur in a supported cell."""
    found = set()
    for factors in itertools.combinations(FACTORS, strength):
        for values in itertools.product(*(FACTORS[factor] for factor in factors)):
            cell = dict(zip(factors, values, strict=True))
            if possible(cell, without):
                found.add(frozenset(cell.items()))
    return found


def cost(cell: Cell) -> float:
    """The approximate CPU seconds of a cell."""
    ranks = 1
    for degree in re.findall(r"\d", cell["mesh"]):
        ranks *= int(degree)
    kinds = 2 if "Gemma" in cell["family"] else 1  # of layers, and twice as many of them
    graphs = 0 if cell["compile"] == "no" else 2 + kinds + (cell["adapter"] == "lora")
    kinds = 2 if cell["blocks"] == "4" else kinds
    steps = (0.7 if "tp" in cell["mesh"] else 0.3) * kinds * int(cell["accumulation"][0])
    return ranks * (0.5 * graphs + steps)


def cover(
    strength: int = 2,
    seed: int = SEED,
    without: frozenset[str] = frozenset(),
    beyond: frozenset[str] | None = None,
    tries: int = 12,
) -> list[Cell]:
    """Cells in which every allowed combination of `strength` values occurs, except those with values of `without`.

    beyond: only combinations that are not in the cover without these.
    """
    random_ = random.Random(seed)
    left = every_part(strength, without) - (set() if beyond is None else every_part(strength, beyond))
    # in a fixed order: the order of a set differs between processes
    queue = sorted(left, key=lambda part: sorted(part))
    random_.shuffle(queue)
    cells = []
    while left:
        queue = [part for part in queue if part in left]
        candidates = [_grown(dict(queue[number % len(queue)]), left, strength, random_, without) for number in range(tries)]
        best = max(candidates, key=lambda cell: sum(part in left for part in parts(cell, strength)) / cost(cell))
        left -= set(parts(best, strength))
        cells.append({factor: best[factor] for factor in FACTORS})
    return cells


def _grown(cell: Cell, left: set[Values], strength: int, random_: random.Random, without: frozenset[str]) -> Cell:
    """The cell with a value for every factor: each value covers the most with those before it; ties go to the plainest."""
    cell.setdefault("precision", PLAIN["precision"])
    factors = [factor for factor in FACTORS if factor not in cell]
    random_.shuffle(factors)
    for factor in factors:
        best, most = "", -1
        for value in FACTORS[factor]:
            more = {**cell, factor: value}
            count = sum(part in left for part in parts(more, strength, factor))
            if count > most and possible(more, without, factor):
                best, most = value, count
        cell[factor] = best
    return cell


def with_dimensions(cell: Cell) -> set[tuple[str, ...]]:
    """Each value alone and with each mesh dimension: where the mathematics can depend only on the mesh.

    In low precision, where rounding hides much, only the precision.
    """
    dimensions = ["", *re.findall(r"([a-z]+) \d", cell["mesh"])]
    factors = list(cell) if cell["precision"] == PLAIN["precision"] else ["mesh", "precision"]
    return {(dimension, factor, cell[factor]) for dimension in dimensions for factor in factors}


def with_schedules(cell: Cell) -> set[tuple[str, ...]]:
    """Each value alone, and pipeline meshes with their schedules."""
    return {(cell["mesh"], cell["schedule"])} | set(cell.items())


def few(cells: dict[str, Cell], shows: Callable[[Cell], set[tuple[str, ...]]]) -> list[str]:
    """The names of cells that together cover everything that any cell covers, the cheapest on ties."""
    shown = {name: shows(cell) for name, cell in cells.items()}
    left, names = set().union(*shown.values()), []
    while left:
        names.append(max(shown, key=lambda name: len(shown[name] & left) / (1 + cost(cells[name]))))
        left -= shown[names[-1]]
    return names


# factors whose values are self-explanatory
SPEAKING = ("mesh", "family", "recompute", "precision", "optimizer", "router", "received", "schedule", "stages")


def name(cell: Cell) -> str:
    """The values of a cell that are not plain."""
    special = [value if factor in SPEAKING else f"{factor} {value}"
               for factor, value in cell.items() if value != PLAIN[factor] and factor != "blocks"]  # fmt: skip
    return ", ".join(special) or "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strength", type=int, default=2, help="cover every combination of so many values")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--all", action="store_true", help="with what only `make test-all` runs")
    words = parser.parse_args()
    without = frozenset() if words.all else LATER
    cells = cover(words.strength, words.seed, without)
    widths = {factor: max(map(len, (factor, *values))) for factor, values in FACTORS.items()}
    print("  ".join(f"{factor:<{width}}" for factor, width in widths.items()))
    for cell in cells:
        print("  ".join(f"{cell[factor]:<{width}}" for factor, width in widths.items()))
    every = every_part(words.strength, without)
    covered = {part for cell in cells for part in parts(cell, words.strength)}
    print(f"{len(cells)} cells; {len(covered & every)} of {len(every)} combinations of {words.strength} values")


if __name__ == "__main__":
    main()
