"""The combinations of meshes, models and options that are trained and compared: a table in which every pair of values occurs.

    python -m tests.distributed.cover [--seed 3] [--all]

prints the table. Every supported pair of values is in at least one cell, found greedily with a seed (Cohen et al., "The AETG
System", IEEE TSE 1997). Among cells that cover equally much, the cheapest is taken: compiled cells and cells on eight ranks
cost several times as much as others.
"""

import argparse
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

Cell = dict[str, str]  # factor -> value
Pair = frozenset[tuple[str, str]]  # of two factors with their values

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
    "gather": ("default", "never", "always", "prefetch"),
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
    Refusal(("gather", "mesh"), lambda g, m: g != "default" and not re.search("shard|context", m), "nothing is gathered"),
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
    Refusal(("mesh", "gather"), lambda m, g: m in PIPELINES and g == "always", "what is gathered stays"),
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
    Refusal(("experts", "mesh"), lambda e, m: e != "whole" and not re.search("shard|tp|context", m), "there is one rank"),
    Refusal(("experts", "mesh"), lambda e, m: e == "split 4" and not re.search(FOUR, m), "4 does not divide the ranks"),
)  # fmt: skip


# Sets of values as numbers with a bit for each value, which makes the search among millions of sets fast.
_BITS = {item: 1 << place for place, item in enumerate((factor, each) for factor in FACTORS for each in FACTORS[factor])}
_BITS_OF = {factor: [_BITS[factor, value] for value in values] for factor, values in FACTORS.items()}
_REFUSED_WITH = dict.fromkeys(_BITS.values(), 0)  # a value -> those that are refused with it
_REFUSED_WITH_BOTH: dict[int, list[int]] = {bit: [] for bit in _REFUSED_WITH}  # and pairs of values
for _refusal in REFUSALS:
    for _values in itertools.product(*(FACTORS[factor] for factor in _refusal.factors)):
        if _refusal.holds(*_values):
            _refused = [_BITS[item] for item in zip(_refusal.factors, _values, strict=True)]
            for _bit in _refused:
                if len(_refused) == 2:
                    _REFUSED_WITH[_bit] |= sum(_refused) - _bit
                else:
                    _REFUSED_WITH_BOTH[_bit].append(sum(_refused) - _bit)
# the values of each factor whose plain one is refused with others: as a set, and one by one
_SEARCHED = {sum(bits): bits for bits in _BITS_OF.values() if _REFUSED_WITH[bits[0]] or _REFUSED_WITH_BOTH[bits[0]]}


def _bits(values: Iterable[tuple[str, str]]) -> int:
    return sum(_BITS[item] for item in values)


def _fits(bit: int, chosen: int) -> bool:
    """Whether a value is not refused with those that are chosen."""
    return not chosen & _REFUSED_WITH[bit] and all(both & ~chosen for both in _REFUSED_WITH_BOTH[bit])


def allowed(cell: Cell) -> bool:
    """Whether titanlite supports these values; missing factors are ignored."""
    given = (refusal for refusal in REFUSALS if cell.keys() >= {*refusal.factors})
    return not any(refusal.holds(*(cell[factor] for factor in refusal.factors)) for refusal in given)


def possible(cell: Cell, without: frozenset[str] = frozenset()) -> bool:
    """Whether these values can be completed by values of the other factors, none of `without`, which has no plain value."""
    chosen, left_out = _bits(cell.items()), _named(without)
    return not chosen & left_out and all(_fits(_BITS[item], chosen) for item in cell.items()) and _completes(chosen, left_out)


def _named(values: frozenset[str]) -> int:
    return _bits(item for item in _BITS if item[1] in values)


def _completes(chosen: int, without: int) -> bool:
    """Whether allowed values can be completed, for factors whose plain value does not fit everywhere."""
    missing = next((bits for every, bits in _SEARCHED.items() if not every & chosen), None)
    if missing is None:
        return True
    return any(not bit & without and _fits(bit, chosen) and _completes(chosen | bit, without) for bit in missing)


def pairs(cell: Cell) -> set[Pair]:
    """The pairs of values that a cell tests: in low precision, where rounding hides much, only those with it."""
    exact, precision = cell["precision"] == PLAIN["precision"], ("precision", cell["precision"])
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2) if exact or precision in pair}


@functools.cache
def every_pair(without: frozenset[str] = frozenset()) -> set[Pair]:
    """All pairs of values that occur in a supported cell."""
    every = (zip(factors, values, strict=True) for factors in itertools.combinations(FACTORS, 2)
             for values in itertools.product(*(FACTORS[factor] for factor in factors)))  # fmt: skip
    return {frozenset(pair.items()) for pair in map(dict, every) if possible(pair, without)}


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
    seed: int = SEED, without: frozenset[str] = frozenset(), beyond: frozenset[str] | None = None, tries: int = 12
) -> list[Cell]:
    """Cells in which every allowed pair of values occurs, except those with values of `without`.

    beyond: only pairs that are not in the cover without these.
    """
    random_ = random.Random(seed)
    # in a fixed order: the order of a set differs between processes
    queue = sorted(every_pair(without) - (set() if beyond is None else every_pair(beyond)), key=sorted)
    random_.shuffle(queue)
    left = dict.fromkeys(_REFUSED_WITH, 0)  # a value -> those whose pair with it is in no cell yet
    for one, other in _both_ways(queue):
        left[one] |= other
    cells = []
    while queue:
        starts = (dict(queue[number % len(queue)]) for number in range(tries))
        candidates = [_grown(start, left, random_, _named(without)) for start in starts]
        best = max(candidates, key=lambda cell, uncovered=set(queue): len(pairs(cell) & uncovered) / cost(cell))
        covered = pairs(best)
        queue = [pair for pair in queue if pair not in covered]
        for one, other in _both_ways(covered):
            left[one] &= ~other
        cells.append({factor: best[factor] for factor in FACTORS})
    return cells


def _both_ways(of: Iterable[Pair]) -> Iterator[tuple[int, int]]:
    return ((_BITS[one], _BITS[other]) for pair in of for one, other in itertools.permutations(pair))


def _grown(cell: Cell, left: dict[int, int], random_: random.Random, without: int) -> Cell:
    """The cell with a value for every factor: each value covers the most with those before it; ties go to the plainest."""
    cell.setdefault("precision", PLAIN["precision"])
    factors = [factor for factor in FACTORS if factor not in cell]
    random_.shuffle(factors)
    for factor in factors:
        best, most, chosen = "", -1, _bits(cell.items())
        tested = chosen if cell["precision"] == PLAIN["precision"] else _BITS["precision", cell["precision"]]  # see `pairs`
        for value in FACTORS[factor]:
            bit = _BITS[factor, value]
            count = (left[bit] & tested).bit_count()
            if count > most and not bit & without and _fits(bit, chosen) and _completes(chosen | bit, without):
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
    others = {item for item in cell.items() if item[0] != "mesh"}
    return others | ({(cell["mesh"], cell["schedule"])} if cell["mesh"] in PIPELINES else set())


def few(cells: dict[str, Cell], shows: Callable[[Cell], set[tuple[str, ...]]]) -> list[str]:
    """The names of cells that together cover everything that any cell covers, the cheapest on ties."""
    shown = {name: shows(cell) for name, cell in cells.items()}
    left, names = set().union(*shown.values()), []
    while left:
        names.append(max(shown, key=lambda name: len(shown[name] & left) / (1 + cost(cells[name]))))
        left -= shown[names[-1]]
    for name in sorted(names, key=lambda name: -cost(cells[name])):
        if shown[name] <= set().union(*(shown[other] for other in names if other != name)):  # by later ones
            names.remove(name)
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
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--all", action="store_true", help="with what only `make test-all` runs")
    words = parser.parse_args()
    without = frozenset() if words.all else LATER
    cells = cover(words.seed, without)
    widths = {factor: max(map(len, (factor, *values))) for factor, values in FACTORS.items()}
    print("  ".join(f"{factor:<{width}}" for factor, width in widths.items()))
    for cell in cells:
        print("  ".join(f"{cell[factor]:<{width}}" for factor, width in widths.items()))
    every = every_pair(without)
    covered = set().union(*map(pairs, cells))
    print(f"{len(cells)} cells; {len(covered & every)} of {len(every)} pairs of values")


if __name__ == "__main__":
    main()
