"""titanlite check-model NAME[:flavor]

Proves that a model file still shards, compiles, checkpoints and converts. On the meta device it looks at the flavour that is
named, or at all of them; on the CPU it trains a small one for a few steps on random tokens, in one process and on meshes of two
and four. A table says what passed, and of what failed the parameter or line at fault. Exit code 0: all passed; 1: something
failed; 2: there is nothing to check.
"""

import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch.multiprocessing import ProcessExitedException

from titanlite.errors import UserError
from titanlite.tools import model_facts
from titanlite.tools.model_facts import SMALL, size_of
from titanlite.tools.model_runs import PATIENCE, Alone, differences, guarded, in_one_process, on_mesh
from titanlite.tools.ranks import on_ranks
from titanlite.tools.verify import compare
from titanlite.transforms.registry import BrokenModule, Family, load_module

ALONE = ("loss and gradients", "parameters", "recomputation", "compile")
MESHES = {"2 x 2": {"dp_shard": 2, "tp": 2}, "tp 2": {"tp": 2}, "shard 2": {"dp_shard": 2}}
CHECKPOINT = "checkpoint"


class Row(NamedTuple):
    """One line of the table."""

    name: str
    verdict: str  # passed, FAILED or not run
    texts: list[str]  # what is wrong, or why it was not run, or a remark


def rows_of(name: str, module: ModuleType, flavors: list[str], small: str | None) -> Iterator[Row]:
    """Every row of the table, as it is found out. flavors: what is looked at on meta. small: what is trained, if any can be."""
    families = {flavor: Family(module, module.FLAVORS[flavor]) for flavor in flavors}
    passed = set()

    def row(title: str, faults: list[str], remark: str = "") -> Row:
        if not faults:
            passed.add(title)
        return Row(title, "FAILED" if faults else "passed", faults or [remark] * bool(remark))

    def lacking(*titles: str) -> list[str]:
        return [f"needs {title}" for title in titles if title not in passed][:1]

    yield row("built on meta", over_flavors(families, model_facts.construction_faults))
    if small is None:
        yield from (Row(title, "not run", ["needs built on meta"]) for title in ("sharding", "initial", *ALONE, *MESHES))
        return
    trained = Family(module, module.FLAVORS[small])
    every = {**families, small: trained}
    # Of all flavours some may be made for one GPU, such as one with a single key and value head.
    split = every if len(families) == 1 else {small: trained}
    yield row("sharding", over_flavors(families, model_facts.table_faults))
    yield row("initial", over_flavors(families, model_facts.initial_faults))
    yield row("buffers", guarded(model_facts.buffer_faults, trained))
    yield row("tp 2 divides", over_flavors(split, model_facts.undivided_faults))
    yield row("FLOPs", over_flavors(every, model_facts.flops_faults))
    yield from _hugging_face(families, trained, row)

    tables = lacking("built on meta", "sharding", "initial")
    with tempfile.TemporaryDirectory() as folder:
        saves = Path(folder) / "checkpoint"
        alone = Alone({}) if tables else _alone(name, small, saves)
        for title in ALONE:
            if title in alone.faults:
                yield row(title, alone.faults[title])
            else:
                yield Row(title, "not run", tables or lacking("loss and gradients"))
        step, reloaded, damage = 1, [], []
        for title, degrees in MESHES.items():
            why = lacking("loss and gradients")
            if not why and "tp" in degrees and guarded(model_facts.undivided_faults, trained):
                why = ["needs tp 2 divides"]
            if why:
                yield Row(title, "not run", why)
                continue
            arguments = (name, small, degrees, saves, step, alone.stored)
            try:
                ranks = math.prod(degrees.values())
                trajectory, faults = on_ranks(ranks, on_mesh, *arguments, timeout_seconds=PATIENCE, use_gpus=False)
            except (UserError, ProcessExitedException) as error:
                yield row(title, [str(error)])
                continue
            yield row(title, differences(compare(trajectory, alone.trajectory)))
            reloaded.append(title)
            damage += [f"on {title}: {fault}" for fault in faults]
            step += not faults
        if reloaded:
            yield row(CHECKPOINT, damage, f"one process -> {' -> '.join(reloaded)}")
        else:
            yield Row(CHECKPOINT, "not run", ["needs a mesh"])


def _alone(name: str, small: str, saves: Path) -> Alone:
    try:
        return on_ranks(1, in_one_process, name, small, saves, timeout_seconds=PATIENCE, use_gpus=False)
    except ProcessExitedException as error:
        return Alone({"loss and gradients": [str(error)]})


def _hugging_face(families: dict[str, Family], trained: Family, row: Callable[..., Row]) -> Iterator[Row]:
    if not hasattr(trained.module, "HF"):
        yield Row("Hugging Face", "not run", ["the module has no HF: it has no counterpart there"])
        return
    names = over_flavors(families, model_facts.name_faults)
    yield row("Hugging Face names", names)
    if not model_facts.has_transformers():
        yield row("Hugging Face logits", [], "names only: transformers is not installed")
    elif names:
        yield Row("Hugging Face logits", "not run", ["needs Hugging Face names"])
    else:
        shapes = over_flavors(families, model_facts.shape_faults)
        yield row("Hugging Face shapes", shapes)
        yield row("Hugging Face logits", guarded(model_facts.logit_faults, trained))


def over_flavors(families: dict[str, Family], check: Callable[[Family], list[str]]) -> list[str]:
    """The faults of all flavours, each once; what only some have begins with their names."""
    found: dict[str, list[str]] = {}
    for flavor, family in families.items():
        for fault in guarded(check, family):
            found.setdefault(fault, []).append(flavor)
    return [fault if len(of) == len(families) else f"{', '.join(of)}: {fault}" for fault, of in found.items()]


def choose_small(name: str, module: ModuleType, flavors: list[str]) -> str | None:
    """The flavour that is trained: the one that was asked for, or "debug", or the smallest; None where none can be built.

    Raises UserError where even that is too large.
    """
    sizes = {}
    for flavor, config in module.FLAVORS.items():
        if not guarded(lambda config=config: [size_of(Family(module, config))][1:]):
            sizes[flavor] = size_of(Family(module, config))
    if not sizes:
        return None
    wanted = [*(flavors if len(flavors) == 1 else []), "debug", min(sizes, key=sizes.__getitem__)]
    for flavor in wanted:
        if sizes.get(flavor, SMALL) < SMALL:
            return flavor
    smallest = wanted[-1]
    raise UserError(
        f"{name}: its smallest flavour, {smallest}, has {sizes[smallest]:,} parameters; give FLAVORS one of fewer than "
        f'{SMALL:,}, such as the "debug" of models/llama3.py, for the checks that train'
    )


# ------------------------------------------------------------------------------------------------------------ the command


def main() -> None:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit(0)
    try:
        if len(words) != 1 or words[0].startswith("-"):
            raise UserError("give one model, such as llama3, llama3:8b or my_models.mine:debug")
        name, _, flavor = words[0].partition(":")
        module = load_module(name)
        if not module.FLAVORS or (flavor and flavor not in module.FLAVORS):
            raise UserError(f"{words[0]}: {name} has the flavours {', '.join(module.FLAVORS) or '(none)'}")
        flavors = [flavor] if flavor else list(module.FLAVORS)
        small = choose_small(name, module, flavors)
    except BrokenModule as error:
        print(f"{'imported':<20} FAILED   {error}")
        sys.exit(1)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{name}: {', '.join(flavors)} on meta; {small or 'nothing'} trained")
    rows = failed = 0
    for row in rows_of(name, module, flavors, small):
        rows, failed = rows + 1, failed + (row.verdict == "FAILED")
        print(f"{row.name:<20} {row.verdict:<8}", f"\n{'':<30}".join(row.texts), flush=True)
    print(f"{failed} of {rows} checks failed" if failed else "all passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
