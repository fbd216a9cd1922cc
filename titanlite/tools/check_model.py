"""titanlite check-model NAME[:flavor] [--model.overrides.dim 512 ...]

Proves that a model file still shards, compiles, checkpoints and converts. On the meta device the command checks the named
flavor, or all of them. On the CPU it trains a small flavor for a few steps on random tokens, in one process and on meshes of
two and four. Each failure names the parameter or the line in your file. Exit code 0: all checks passed; 1: a check failed; 2:
there is nothing to check; 3: no check failed, and of a difference it is undecided whether it is a fault or rounding.

Overrides change dimensions of every flavor, also of the one that is trained.
"""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.config.read import read_config
from titanlite.config.schema import Model
from titanlite.errors import UserError
from titanlite.parallel import context, expert, pipeline
from titanlite.parallel.mesh import ranks_of
from titanlite.tools import model_behaviour, model_facts
from titanlite.tools.compare import MESHES, compare, meshes_of
from titanlite.tools.model_facts import SMALL, size_of
from titanlite.tools.model_loop import Runs, random_faults, run_faults, run_loops
from titanlite.tools.model_runs import (
    TIMEOUT_SECONDS,
    NotRun,
    Trained,
    Undecided,
    buffer_differences,
    damage,
    describe,
    forgotten_buffers,
    gradients_small,
    guarded,
    rounding_faults,
    train_small,
)
from titanlite.tools.options import command_parser
from titanlite.tools.ranks import on_ranks
from titanlite.tools.rounding import in_order, settle, tolerances
from titanlite.transforms.activation_checkpoint import unchunkable
from titanlite.transforms.overrides import overridden
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
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "in parts": {"mode": "full", "sequence_chunks": 3},
    "by operation": {"mode": "selective", "selective_ac_option": "op"},
}
CHECKPOINT, BUFFERS = "checkpoint", "buffers"
ROUNDING = "rounding"
STOCHASTIC: dict[str, dict[str, Any]] = {
    "training": {"dtype": "bfloat16", "steps": 1},
    "optimizer": {"rounding": "stochastic"},
}
RESUME, RANDOM = "resume", "random numbers"


class Row(NamedTuple):
    """One line of the table."""

    name: str
    verdict: str  # passed, FAILED, undecided or not run
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
            faults = guarded(check)
        except NotRun as reason:
            return Row(name, "not run", [str(reason)])
        if faults:
            return Row(name, "undecided" if all(isinstance(fault, Undecided) for fault in faults) else "FAILED", faults)
        self._passed.add(name)
        return Row(name, "passed", [remark] if remark else [])


def rows_of(
    name: str, module: ModuleType, flavors: list[str], small: str | None, overrides: dict[str, Any] | None = None
) -> Iterator[Row]:
    """All rows of the table, each as soon as it is known.

    flavors: checked on meta. small: the flavor that is trained; None where no flavor can be built. overrides: of dimensions, in
    every flavor.
    """
    families, table = {flavor: _family(name, module, flavor, overrides) for flavor in flavors}, Table()

    def on_meta(row: str, check: Callable[[Family], list[str]], of: dict[str, Family], *needs: str) -> Row:
        return table.row(row, partial(over_flavors, of, check), needs)

    yield on_meta(BUILT, model_facts.construction_faults, families)
    if small is None:
        rows = ("sharding", "initial", TRAINED, *BEHAVIOUR, RECOMPUTED, COMPILED, *MESHES, ROUNDING, RESUME, RANDOM)
        yield from (table.row(row, list, [BUILT]) for row in rows)
        return
    trained = {small: _family(name, module, small, overrides)}
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
        model = Model(name=name, flavor=small, overrides=overrides or {})
        yield from _training_rows(model, trained[small], Path(folder) / "checkpoint", table)


def _training_rows(model: Model, family: Family, saves: Path, table: Table) -> Iterator[Row]:
    """The rows of a small model in training. Its checkpoint goes from one process to each mesh in turn."""
    alone: Trained | None = None
    step = 1  # of the newest sound checkpoint
    meshes: list[str] = []  # those that loaded the checkpoint
    damaged: list[str] = []
    unsteady: list[str] = []  # buffers
    whole_runs: list[Runs] = []
    notes: list[str] = []  # of the row that is running

    def run(function: Callable[..., Any], sections: dict[str, dict[str, Any]], degrees: dict[str, int], *more: Any) -> Any:
        words = model, sections, degrees, *more
        return on_ranks(ranks_of(degrees), function, *words, timeout_seconds=TIMEOUT_SECONDS, use_gpus=False)

    def row(*arguments: Any, **options: Any) -> Row:
        notes.clear()
        result = table.row(*arguments, **options)
        return result._replace(texts=result.texts + notes) if result.verdict == "passed" else result

    def train_alone() -> list[str]:
        nonlocal alone
        alone = run(train_small, {}, {}, saves)
        assert alone is not None and alone.buffers is not None
        unsteady.extend(forgotten_buffers(alone.buffers))
        notes.extend(tolerances(compare(alone.trajectory, alone.trajectory)))
        return alone.faults

    @functools.cache
    def alone_in_float64() -> dict[str, Tensor]:
        return run(gradients_small, {}, {})

    def differences(
        trained: Trained, reference: Trained | None, name: str, sections: dict[str, dict[str, Any]], degrees: dict[str, int]
    ) -> list[str]:
        assert reference is not None and reference.buffers is not None and trained.buffers is not None
        unsteady.extend(f"{name}: {fault}" for fault in buffer_differences(trained.buffers, reference.buffers))
        comparison = compare(trained.trajectory, reference.trajectory)
        if not comparison.undecided:
            return describe(comparison) + trained.faults
        try:
            wide = run(gradients_small, sections, degrees), alone_in_float64()
        except UserError as error:
            reason = f"its rounding is as large, and the model does not run in float64: {error}"
            return [*(Undecided(f"{text}: {reason}") for text in describe(comparison)), *trained.faults]
        settled = settle(trained.trajectory, reference.trajectory, *wide)
        if settled.equal:
            notes.extend(f"{text}: rounding, since in float64 it does not" for text in describe(comparison))
        kind = Undecided if settled.undecided else str
        return [*(kind(f"in float64, {text}") for text in describe(settled)), *trained.faults]

    def compiled() -> list[str]:
        sections = {"compile": {"enable": True, "backend": "aot_eager"}}
        return differences(run(train_small, sections, {}), alone, "compiled", sections, {})

    def recompute() -> list[str]:
        assert alone is not None
        with_dropout = None, 0, True
        reference = run(train_small, {}, {}, *with_dropout)
        reference = reference._replace(trajectory=in_order(reference.trajectory, alone.trajectory.noise or {}))

        def recomputed(name: str, sections: dict[str, dict[str, Any]]) -> list[str]:
            return differences(run(train_small, sections, {}, *with_dropout), reference, name, sections, {})

        faults = {
            name: guarded(recomputed, f"recomputed {name}", {"activation_checkpoint": keys})
            for name, keys in RECOMPUTATION.items()
            if "sequence_chunks" not in keys or not unchunkable(family.on_meta())  # then a run refuses it
        }
        return [type(fault)(f"recomputed {name}: {fault}") for name in faults for fault in faults[name]]

    def train_on(mesh: str, degrees: dict[str, int]) -> list[str]:
        nonlocal step
        assert alone is not None and alone.stored is not None
        if "cp" in degrees and (reason := context.unsplittable(family.on_meta())):
            raise NotRun(f"{reason}; context parallelism refuses this model")
        if "ep" in degrees and (reason := expert.unsplittable(family.on_meta(), degrees["ep"])):
            raise NotRun(f"the model has {reason}; expert parallelism refuses it")
        if "pp" in degrees and (reason := pipeline.unsplittable(family, degrees["pp"])):
            raise NotRun(f"{reason}; pipeline parallelism refuses this model")
        trained = run(train_small, {}, degrees, saves, step)
        faults = damage(trained, alone.stored)
        meshes.append(mesh)
        damaged.extend(f"on {mesh}: {fault}" for fault in faults)
        step += not faults
        return differences(trained, alone, f"on {mesh}", {}, degrees)

    def round_stochastically() -> list[str]:
        alone, split = (run(train_small, STOCHASTIC, degrees) for degrees in ({}, MESHES["shard 2"]))
        return rounding_faults(split.trajectory, alone.trajectory)

    def run_whole() -> list[str]:
        degrees = MESHES[widest]
        words = model, degrees, saves.parent
        runs = on_ranks(ranks_of(degrees), run_loops, *words, timeout_seconds=TIMEOUT_SECONDS, use_gpus=False)
        whole_runs.append(runs)
        return run_faults(runs)

    yield row(TRAINED, train_alone, TABLES)
    for behaviour, (check, needs) in BEHAVIOUR.items():
        yield table.row(behaviour, partial(check, family), (*TABLES, *needs))
    yield row(RECOMPUTED, recompute, (*TABLES, TRAINED))
    yield row(COMPILED, compiled, (*TABLES, TRAINED))
    undivided = guarded(model_facts.undivided_faults, family)
    for mesh, degrees in meshes_of(family.on_meta()).items():
        needs = (TRAINED, DIVIDES) if undivided and "tp" in degrees else (TRAINED,)
        yield row(mesh, partial(train_on, mesh, degrees), needs)
    if meshes:
        yield table.row(CHECKPOINT, lambda: damaged, remark=f"one process -> {' -> '.join(meshes)}")
    else:
        yield Row(CHECKPOINT, "not run", ["needs a mesh"])
    yield table.row(BUFFERS, lambda: unsteady, (TRAINED,))
    widest = next(mesh for mesh, degrees in MESHES.items() if not undivided or "tp" not in degrees)
    yield table.row(ROUNDING, round_stochastically, ("shard 2",))
    yield table.row(RESUME, run_whole, (widest,))
    yield table.row(RANDOM, lambda: random_faults(whole_runs[0]), (RESUME,))


def over_flavors(families: dict[str, Family], check: Callable[[Family], list[str]]) -> list[str]:
    """The faults of all flavors, each once; a fault that only some have begins with their names."""
    owners: dict[str, list[str]] = {}
    for flavor, family in families.items():
        for fault in guarded(check, family):
            owners.setdefault(fault, []).append(flavor)
    return [fault if len(of) == len(families) else f"{', '.join(of)}: {fault}" for fault, of in owners.items()]


def _family(name: str, module: ModuleType, flavor: str, overrides: dict[str, Any] | None) -> Family:
    """A flavor of a loaded module. Raises UserError for wrong overrides."""
    return Family(module, overridden(module.FLAVORS[flavor], overrides or {}, list(module.FLAVORS.values()), name))


def choose_small(name: str, module: ModuleType, flavors: list[str], overrides: dict[str, Any] | None = None) -> str | None:
    """The flavor to train: the one the user named, or "debug", or the smallest; None where no flavor can be built.

    Raises UserError where even that is too large.
    """
    sizes = {}
    for flavor in module.FLAVORS:
        with contextlib.suppress(Exception):  # the row "built on meta" reports it
            sizes[flavor] = size_of(_family(name, module, flavor, overrides))
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


def _use_one_thread() -> None:
    """In this process, and in each rank, unless OMP_NUM_THREADS is set.

    The models are small. Threads wait for each other after each operation: where other programs run too, that took ten times
    as long for mixtures, whose products are many and small.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def _overrides(options: list[str]) -> dict[str, Any]:
    """The dimensions of --model.overrides.NAME VALUE. Raises UserError for any other option."""
    key = "--model.overrides"
    if other := [word for word in options if word.startswith("-") and not word.startswith((f"{key}.", f"{key}="))]:
        raise UserError(f"{', '.join(other)}: check-model has no other options than {key}.NAME VALUE, such as {key}.dim 512")
    return read_config(None, options).model.overrides


def main() -> None:
    """Exit code 0: all checks passed; 1: a check failed; 2: a user error; 3: none failed, and one is undecided."""
    parser = command_parser("check-model", __doc__)
    parser.add_argument("model", help="such as llama3, llama3:8b or my_models.mine:debug")
    known, options = parser.parse_known_args()
    _use_one_thread()
    model, overrides = known.model, _overrides(options)
    name, _, flavor = model.partition(":")
    try:
        module = load_module(name)
        if not module.FLAVORS or (flavor and flavor not in module.FLAVORS):
            raise UserError(f"{model}: {name} has the flavors {', '.join(module.FLAVORS) or '(none)'}")
        flavors = [flavor] if flavor else list(module.FLAVORS)
        for each in flavors:
            _family(name, module, each, overrides)  # refuses wrong overrides before the first line of the table
        small = choose_small(name, module, flavors, overrides)
    except BrokenModule as error:
        print(f"{'imported':<20} FAILED    {error}")
        sys.exit(1)
    title = Model(name=name, flavor=", ".join(flavors), overrides=overrides).title.replace(" ", ": ", 1)
    print(f"{title} on meta; {small or 'nothing'} trained")
    verdicts: list[str] = []
    for row in rows_of(name, module, flavors, small, overrides):
        verdicts.append(row.verdict)
        print(f"{row.name:<20} {row.verdict:<9}", f"\n{'':<31}".join(row.texts), flush=True)
    failed, undecided = verdicts.count("FAILED"), verdicts.count("undecided")
    print(f"{failed} of {len(verdicts)} checks failed" if failed else f"{undecided} undecided" if undecided else "all passed")
    sys.exit(1 if failed else 3 if undecided else 0)
