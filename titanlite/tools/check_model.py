"""titanlite check-model NAME[:flavor]

Proves that a model file still shards, compiles, checkpoints and converts. On the meta device the command checks the named
flavor, or all of them. On the CPU it trains a small flavor for a few steps on random tokens, in one process and on meshes of
two and four. Each failure names the parameter or the line in your file. Exit code 0: all checks passed; 1: a check failed; 2:
there is nothing to check.
"""

import contextlib
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from titanlite.errors import UserError
from titanlite.tools import model_behaviour, model_facts
from titanlite.tools.compare import compare
from titanlite.tools.model_facts import SMALL, size_of
from titanlite.tools.model_runs import (
    TIMEOUT_SECONDS,
    NotRun,
    Trained,
    buffer_differences,
    damage,
    describe,
    forgotten_buffers,
    guarded,
    train_small,
)
from titanlite.tools.options import command_parser
from titanlite.tools.ranks import on_ranks
from titanlite.transforms.registry import BrokenModule, Family, load_module

BUILT, DIVIDES, TRAINED = "built on meta", "tp 2 divides", "loss and gradients"
TABLES = (BUILT, "sharding", "initial")
CAUSAL = "causal"
# row -> its check, and the rows that it needs: without causality, what follows a document or a prompt would change it
BEHAVIOUR: dict[str, tuple[Callable[[Family], list[str]], tuple[str, ...]]] = {
    CAUSAL: (model_behaviour.causality_faults, (TRAINED,)),
    "documents": (model_behaviour.document_faults, (CAUSAL,)),
    "generate": (model_behaviour.generation_faults, (CAUSAL,)),
    "bfloat16": (model_behaviour.bfloat16_faults, (TRAINED,)),
}
RECOMPUTED, COMPILED = "recomputation", "compile"
RECOMPUTATION = {"full": {"mode": "full"}, "by operation": {"mode": "selective", "selective_ac_option": "op"}}
MESHES = {"2 x 2": {"dp_shard": 2, "tp": 2}, "tp 2": {"tp": 2}, "shard 2": {"dp_shard": 2}}
CHECKPOINT, BUFFERS = "checkpoint", "buffers"


class Row(NamedTuple):
    """One line of the table."""

    name: str
    verdict: str  # passed, FAILED or not run
    texts: list[str]  # the faults, the reason why it was not run, or a remark


class Table:
    """Makes the rows, and remembers which have passed."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    def row(self, name: str, check: Callable[[], list[str]], needs: Sequence[str] = (), remark: str = "") -> Row:
        """Runs a check, which returns faults, if all rows that it needs have passed. remark: printed where it passes."""
        if missing := [need for need in needs if need not in self._passed]:
            return Row(name, "not run", [f"needs {missing[0]}"])
        try:
            if faults := guarded(check):
                return Row(name, "FAILED", faults)
        except NotRun as reason:
            return Row(name, "not run", [str(reason)])
        self._passed.add(name)
        return Row(name, "passed", [remark] if remark else [])


def rows_of(name: str, module: ModuleType, flavors: list[str], small: str | None) -> Iterator[Row]:
    """All rows of the table, each as soon as it is known.

    flavors: checked on meta. small: the flavor that is trained; None where no flavor can be built.
    """
    families, table = {flavor: Family(module, module.FLAVORS[flavor]) for flavor in flavors}, Table()

    def on_meta(row: str, check: Callable[[Family], list[str]], of: dict[str, Family], *needs: str) -> Row:
        return table.row(row, partial(over_flavors, of, check), needs)

    yield on_meta(BUILT, model_facts.construction_faults, families)
    if small is None:
        rows = ("sharding", "initial", TRAINED, *BEHAVIOUR, RECOMPUTED, COMPILED, *MESHES)
        yield from (table.row(row, list, [BUILT]) for row in rows)
        return
    trained = {small: Family(module, module.FLAVORS[small])}
    # Flavors that nobody named may be made for one GPU, such as one with a single key and value head.
    divided = families | trained if len(families) == 1 else trained
    yield on_meta("sharding", model_facts.table_faults, families)
    initial = on_meta("initial", model_facts.initial_faults, families)
    yield initial._replace(texts=initial.texts or [model_facts.initial_remark(trained[small])])
    yield on_meta("constructor", model_facts.constructor_faults, trained)
    yield on_meta(DIVIDES, model_facts.undivided_faults, divided)
    yield on_meta("FLOPs", model_facts.flops_faults, families | trained)
    if not hasattr(module, "HF"):
        yield Row("Hugging Face", "not run", ["the module has no HF: it has no counterpart there"])
    else:
        yield on_meta("Hugging Face names", model_facts.name_faults, families)
        if model_facts.has_transformers():
            yield on_meta("Hugging Face shapes", model_facts.shape_faults, families, "Hugging Face names")
            yield on_meta("Hugging Face logits", model_facts.logit_faults, trained, "Hugging Face names")
        else:
            yield Row("Hugging Face logits", "passed", ["names only: transformers is not installed"])
    with tempfile.TemporaryDirectory() as folder:
        yield from _training_rows(name, small, trained[small], Path(folder) / "checkpoint", table)


def _training_rows(name: str, small: str, family: Family, saves: Path, table: Table) -> Iterator[Row]:
    """The rows of a small model in training. Its checkpoint goes from one process to each mesh in turn."""
    alone: Trained | None = None
    step = 1  # of the newest sound checkpoint
    meshes: list[str] = []  # those that loaded the checkpoint
    damaged: list[str] = []
    unsteady: list[str] = []  # buffers

    def train(sections: dict[str, dict[str, Any]], degrees: dict[str, int], *checkpoint: Any) -> Trained:
        words = name, small, sections, degrees, *checkpoint
        count = math.prod(degrees.values())
        return on_ranks(count, train_small, *words, timeout_seconds=TIMEOUT_SECONDS, use_gpus=False)

    def train_alone() -> list[str]:
        nonlocal alone
        alone = train({}, {}, saves)
        assert alone.buffers is not None
        unsteady.extend(forgotten_buffers(alone.buffers))
        return alone.faults

    def differences(trained: Trained, run: str) -> list[str]:
        assert alone is not None and alone.buffers is not None and trained.buffers is not None
        unsteady.extend(f"{run}: {fault}" for fault in buffer_differences(trained.buffers, alone.buffers))
        return describe(compare(trained.trajectory, alone.trajectory)) + trained.faults

    def train_with(run: str, section: str, keys: dict[str, Any]) -> list[str]:
        return differences(train({section: keys}, {}), run)

    def recompute() -> list[str]:
        runs = {f"recomputed {words}": keys for words, keys in RECOMPUTATION.items()}
        faults = {run: guarded(train_with, run, "activation_checkpoint", keys) for run, keys in runs.items()}
        return [f"{run}: {fault}" for run in faults for fault in faults[run]]

    def train_on(mesh: str, degrees: dict[str, int]) -> list[str]:
        nonlocal step
        assert alone is not None and alone.stored is not None
        trained = train({}, degrees, saves, step)
        faults = damage(trained, alone.stored)
        meshes.append(mesh)
        damaged.extend(f"on {mesh}: {fault}" for fault in faults)
        step += not faults
        return differences(trained, f"on {mesh}")

    yield table.row(TRAINED, train_alone, TABLES)
    for row, (check, needs) in BEHAVIOUR.items():
        yield table.row(row, partial(check, family), (*TABLES, *needs))
    yield table.row(RECOMPUTED, recompute, (*TABLES, TRAINED))
    yield table.row(
        COMPILED, partial(train_with, "compiled", "compile", {"enable": True, "backend": "aot_eager"}), (*TABLES, TRAINED)
    )
    undivided = guarded(model_facts.undivided_faults, family)
    for mesh, degrees in MESHES.items():
        needs = (TRAINED, DIVIDES) if undivided and "tp" in degrees else (TRAINED,)
        yield table.row(mesh, partial(train_on, mesh, degrees), needs)
    if meshes:
        yield table.row(CHECKPOINT, lambda: damaged, remark=f"one process -> {' -> '.join(meshes)}")
    else:
        yield Row(CHECKPOINT, "not run", ["needs a mesh"])
    yield table.row(BUFFERS, lambda: unsteady, (TRAINED,))


def over_flavors(families: dict[str, Family], check: Callable[[Family], list[str]]) -> list[str]:
    """The faults of all flavors, each once; a fault that only some have begins with their names."""
    owners: dict[str, list[str]] = {}
    for flavor, family in families.items():
        for fault in guarded(check, family):
            owners.setdefault(fault, []).append(flavor)
    return [fault if len(of) == len(families) else f"{', '.join(of)}: {fault}" for fault, of in owners.items()]


def choose_small(name: str, module: ModuleType, flavors: list[str]) -> str | None:
    """The flavor to train: the one the user named, or "debug", or the smallest; None where no flavor can be built.

    Raises UserError where even that is too large.
    """
    sizes = {}
    for flavor, config in module.FLAVORS.items():
        with contextlib.suppress(Exception):  # the row "built on meta" reports it
            sizes[flavor] = size_of(Family(module, config))
    if not sizes:
        return None
    smallest = min(sizes, key=sizes.__getitem__)
    for flavor in [*(flavors if len(flavors) == 1 else []), "debug", smallest]:
        if sizes.get(flavor, SMALL) < SMALL:
            return flavor
    raise UserError(
        f"{name}: its smallest flavor, {smallest}, has {sizes[smallest]:,} parameters; give FLAVORS one of fewer than "
        f'{SMALL:,}, such as the "debug" of models/llama3.py, for the checks that train'
    )


# ------------------------------------------------------------------------------------------------------------ the command


def main() -> None:
    """Exit code 0: all checks passed; 1: a check failed; 2: a user error."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parser = command_parser("check-model", __doc__)
    parser.add_argument("model", help="such as llama3, llama3:8b or my_models.mine:debug")
    model = parser.parse_args().model
    name, _, flavor = model.partition(":")
    try:
        module = load_module(name)
        if not module.FLAVORS or (flavor and flavor not in module.FLAVORS):
            raise UserError(f"{model}: {name} has the flavors {', '.join(module.FLAVORS) or '(none)'}")
        flavors = [flavor] if flavor else list(module.FLAVORS)
        small = choose_small(name, module, flavors)
    except BrokenModule as error:
        print(f"{'imported':<20} FAILED   {error}")
        sys.exit(1)
    print(f"{name}: {', '.join(flavors)} on meta; {small or 'nothing'} trained")
    rows = failed = 0
    for row in rows_of(name, module, flavors, small):
        rows, failed = rows + 1, failed + (row.verdict == "FAILED")
        print(f"{row.name:<20} {row.verdict:<8}", f"\n{'':<30}".join(row.texts), flush=True)
    print(f"{failed} of {rows} checks failed" if failed else "all passed")
    sys.exit(1 if failed else 0)
