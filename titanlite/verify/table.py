"""The table of `titanlite check-model`: its rows, what each needs, and what it runs."""

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from titanlite.config.schema import Model
from titanlite.ground.errors import UserError
from titanlite.launch.local_ranks import on_ranks
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import Family
from titanlite.registry.limits import no_generation, refused_dimensions
from titanlite.registry.overrides import overridden
from titanlite.transforms.activation_checkpoint import unchunkable
from titanlite.verify import behavior, facts
from titanlite.verify.compare import EVERY_MESH, MESHES, compare, meshes_of, unsplittable
from titanlite.verify.facts import SMALL, size_of
from titanlite.verify.rounding import settle, tolerances
from titanlite.verify.small_runs import (
    TIMEOUT_SECONDS,
    Declared,
    NotRun,
    Trained,
    Undecided,
    buffer_differences,
    damage,
    describe,
    forgotten_buffers,
    gradients_small,
    guarded,
    train_small,
)
from titanlite.verify.whole_runs import Runs, random_faults, run_faults, run_loops

BUILT, DIVIDES, TRAINED = "built on meta", "tp 2 divides", "loss and gradients"
TABLES = (BUILT, "sharding", "initial")
CONSTRUCTOR, FLOPS, HUGGING_FACE = "constructor", "FLOPs", "Hugging Face"
CAUSAL, DOCUMENTS, GENERATE, BFLOAT16 = "causality", "documents", "generate", "bfloat16"
BEHAVIOR = (CAUSAL, DOCUMENTS, GENERATE, BFLOAT16)
RECOMPUTED, COMPILED = "recomputation", "compile"
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "in parts": {"mode": "full", "sequence_chunks": 3},
    "by operation": {"mode": "selective", "selective_ac_option": "op"},
}
CHECKPOINT, BUFFERS = "checkpoint", "buffers"
RESUME, RANDOM = "resume", "random numbers"
ROWS = (
    *(*TABLES, CONSTRUCTOR, DIVIDES, FLOPS, HUGGING_FACE, TRAINED, *BEHAVIOR, RECOMPUTED, COMPILED),
    *(*EVERY_MESH, CHECKPOINT, BUFFERS, RESUME, RANDOM),
)


class Row(NamedTuple):
    """One line of the table."""

    name: str
    verdict: str  # passed, FAILED, undecided, declared or not run
    texts: list[str]  # the faults, the reason why it was not run, or remarks
    seconds: float = 0.0


class Check(NamedTuple):
    """What makes a row."""

    name: str
    run: Callable[[], list[str]]  # returns faults
    after: tuple[str, ...] = ()  # rows that must have passed, or it is not run
    uses: tuple[str, ...] = ()  # rows whose results it needs, which therefore run too


class Table:
    """Makes the rows, and remembers which have passed. notes: printed if the row that is running passes."""

    def __init__(self) -> None:
        self._passed: dict[str, bool] = {}  # of each row so far
        self.notes: list[str] = []

    def row(self, check: Check) -> Row:
        """Runs a check, if all rows that it comes after have passed, or were not selected."""
        begun = time.monotonic()
        self.notes.clear()
        verdict, texts = self._outcome(check)
        self._passed[check.name] = verdict in ("passed", "declared")
        return Row(check.name, verdict, texts, time.monotonic() - begun)

    def _outcome(self, check: Check) -> tuple[str, list[str]]:
        if missing := [name for name in check.after if not self._passed.get(name, True)]:
            return "not run", [f"needs {missing[0]}"]
        try:
            faults = guarded(check.run)
        except NotRun as reason:
            return "declared" if isinstance(reason, Declared) else "not run", [str(reason)]
        if faults:
            return "undecided" if all(isinstance(fault, Undecided) for fault in faults) else "FAILED", faults
        return "passed", [note for note in self.notes if note]


def rows_of(
    name: str,
    module: ModuleType,
    flavors: list[str],
    small: str | None,
    overrides: dict[str, Any] | None = None,
    selected: Collection[str] = (),
) -> Iterator[Row]:
    """The rows of the table, each as soon as it is known.

    flavors: checked on meta. small: the flavor that is trained; None where no flavor can be built. overrides: of dimensions, in
    every flavor. selected: of ROWS; empty: all that apply. Others that they need run too, and are rows if they do not pass.
    """
    families, table = {flavor: family_of_flavor(name, module, flavor, overrides) for flavor in flavors}, Table()
    with tempfile.TemporaryDirectory() as folder:
        if small is None:
            checks = [Check(BUILT, partial(over_flavors, families, facts.construction_faults))]
            checks += [Check(row, list, (BUILT,)) for row in ROWS if row != BUILT and (row in MESHES or row not in EVERY_MESH)]
        else:
            model = Model(name=name, flavor=small, overrides=overrides or {})
            trained = family_of_flavor(name, module, small, overrides)
            checks = _checks_on_meta(model, families, trained, table)
            checks += _checks_in_training(model, trained, Path(folder) / "checkpoint", table, selected)
        needed = {*selected} or {check.name for check in checks}
        for check in reversed(checks):  # each uses rows before it
            needed |= {*check.uses} if check.name in needed else set()
        for check in checks:
            if check.name in needed or check.name in TABLES:
                row = table.row(check)
                if not selected or row.name in selected or row.verdict not in ("passed", "declared"):
                    yield row


def _checks_on_meta(model: Model, families: dict[str, Family], trained: Family, table: Table) -> list[Check]:
    """The rows without training. trained: the flavor that the others train."""
    of_trained = {model.flavor: trained}
    # Flavors that nobody named may be made for one GPU, such as one with a single key and value head.
    divided = families | of_trained if len(families) == 1 else of_trained

    def initial() -> list[str]:
        table.notes.append(facts.initial_remark(trained))
        return over_flavors(families, facts.initial_faults)

    def divides() -> list[str]:
        if most := trained.limits.tensor_parallel:
            text = _refusal(trained, {"tp": most + 1})
            if most == 1:
                raise Declared(text)
            table.notes.append(text)
        return over_flavors(divided, facts.undivided_faults)

    def hugging_face() -> list[str]:
        if not hasattr(trained.module, "HF"):
            raise NotRun("the module has no HF: it has no counterpart there")
        if faults := over_flavors(families, facts.name_faults):
            return faults
        if not facts.has_transformers():
            table.notes.append("names only: transformers is not installed")
            return []
        return over_flavors(families, facts.shape_faults) or over_flavors(of_trained, facts.logit_faults)

    return [
        Check(BUILT, partial(over_flavors, families, facts.construction_faults)),
        Check("sharding", partial(over_flavors, families, facts.table_faults)),
        Check("initial", initial),
        Check(CONSTRUCTOR, partial(over_flavors, of_trained, facts.constructor_faults)),
        Check(DIVIDES, divides),
        Check(FLOPS, partial(over_flavors, families | of_trained, facts.flops_faults)),
        Check(HUGGING_FACE, hugging_face),
    ]


def _checks_in_training(model: Model, family: Family, saves: Path, table: Table, selected: Collection[str]) -> list[Check]:
    """The rows of a small model that runs. Its checkpoint goes from one process to each mesh in turn."""
    whole = family.on_meta()
    meshes = {mesh: EVERY_MESH[mesh] for mesh in EVERY_MESH if mesh in {*meshes_of(whole), *selected}}
    alone: Trained | None = None
    step = 1  # of the newest sound checkpoint
    loaded: list[str] = []  # the meshes that loaded the checkpoint
    damaged: list[str] = []
    unsteady: list[str] = []  # buffers
    whole_runs: list[Runs] = []

    def run(function: Callable[..., Any], sections: dict[str, dict[str, Any]], degrees: dict[str, int], *more: Any) -> Any:
        words = model, sections, degrees, *more
        return on_ranks(ranks_of(degrees), function, *words, timeout_seconds=TIMEOUT_SECONDS, use_gpus=False)

    def train_alone() -> list[str]:
        nonlocal alone
        alone = run(train_small, {}, {}, saves)
        assert alone is not None
        unsteady.extend(forgotten_buffers(alone.buffers))
        table.notes.extend(tolerances(compare(alone.trajectory, alone.trajectory)))
        return alone.faults

    @functools.cache
    def alone_in_float64() -> dict[str, Tensor]:
        return run(gradients_small, {}, {})

    def differences(
        trained: Trained, reference: Trained | None, name: str, sections: dict[str, dict[str, Any]], degrees: dict[str, int]
    ) -> list[str]:
        assert reference is not None
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
            table.notes.extend(f"{text}: rounding, since in float64 it does not" for text in describe(comparison))
        kind = Undecided if settled.undecided else str
        return [*(kind(f"in float64, {text}") for text in describe(settled)), *trained.faults]

    def compiled() -> list[str]:
        sections = {"compile": {"enable": True, "backend": "aot_eager"}}
        return differences(run(train_small, sections, {}), alone, "compiled", sections, {})

    def recompute() -> list[str]:
        assert alone is not None
        with_dropout = None, 0, True
        reference = run(train_small, {}, {}, *with_dropout)
        reference = reference._replace(trajectory=reference.trajectory._replace(noise=alone.trajectory.noise))

        def recomputed(name: str, sections: dict[str, dict[str, Any]]) -> list[str]:
            return differences(run(train_small, sections, {}, *with_dropout), reference, name, sections, {})

        faults = {
            name: guarded(recomputed, f"recomputed {name}", {"activation_checkpoint": keys})
            for name, keys in RECOMPUTATION.items()
            if "sequence_chunks" not in keys or not unchunkable(whole)  # then a run refuses it
        }
        return [type(fault)(f"recomputed {name}: {fault}") for name in faults for fault in faults[name]]

    def train_on(mesh: str, degrees: dict[str, int]) -> list[str]:
        nonlocal step
        assert alone is not None and alone.stored is not None
        if text := _refusal(family, degrees):
            raise Declared(text)
        if reason := unsplittable(family, whole, degrees):
            raise NotRun(reason)
        trained = run(train_small, {}, degrees, saves, step)
        faults = damage(trained, alone.stored)
        loaded.append(mesh)
        damaged.extend(f"on {mesh}: {fault}" for fault in faults)
        step += not faults
        return differences(trained, alone, f"on {mesh}", {}, degrees)

    def run_whole() -> list[str]:
        degrees = MESHES[widest]
        words = model, degrees, saves.parent
        runs = on_ranks(ranks_of(degrees), run_loops, *words, timeout_seconds=TIMEOUT_SECONDS, use_gpus=False)
        whole_runs.append(runs)
        return run_faults(runs)

    def causality() -> list[str]:
        if not family.limits.causal:
            raise Declared(_refusal(family, {"cp": 2}))
        return behavior.causality_faults(family)

    def generation() -> list[str]:
        if text := no_generation(family.limits):
            raise Declared(text)
        return behavior.generation_faults(family)

    def all_loaded() -> list[str]:
        if not loaded:
            raise NotRun("needs a mesh")
        table.notes.append(f"one process -> {' -> '.join(loaded)}")
        return damaged

    undivided = bool(guarded(facts.undivided_faults, family)) or family.limits.tensor_parallel == 1
    widest = next(mesh for mesh, degrees in MESHES.items() if not undivided or "tp" not in degrees)
    on_meshes = [
        Check(mesh, partial(train_on, mesh, degrees), (*need, TRAINED), (*need, TRAINED))
        for mesh, degrees in meshes.items()
        for need in [(DIVIDES,) if undivided and "tp" in degrees else ()]
    ]
    return [
        Check(TRAINED, train_alone, TABLES),
        # without causality, what follows a document or a prompt would change it
        Check(CAUSAL, causality, (*TABLES, TRAINED)),
        Check(DOCUMENTS, partial(behavior.document_faults, family), (*TABLES, CAUSAL), (CAUSAL,)),
        Check(GENERATE, generation, (*TABLES, CAUSAL), (CAUSAL,)),
        Check(BFLOAT16, partial(behavior.bfloat16_faults, family), (*TABLES, TRAINED)),
        Check(RECOMPUTED, recompute, (*TABLES, TRAINED), (TRAINED,)),
        Check(COMPILED, compiled, (*TABLES, TRAINED), (TRAINED,)),
        *on_meshes,
        Check(CHECKPOINT, all_loaded, (), (TRAINED, *meshes)),
        Check(BUFFERS, lambda: unsteady, (TRAINED,), (TRAINED, RECOMPUTED, COMPILED, *meshes)),
        Check(RESUME, run_whole, (widest,)),
        Check(RANDOM, lambda: random_faults(whole_runs[0]), (RESUME,), (RESUME,)),
    ]


def _refusal(family: Family, degrees: dict[str, int]) -> str:
    """What a family declares against a mesh; "" for nothing."""
    return next(iter(refused_dimensions(family.limits, degrees).values()), "")


def over_flavors(families: dict[str, Family], check: Callable[[Family], list[str]]) -> list[str]:
    """The faults of all flavors, each once; a fault that only some have begins with their names."""
    owners: dict[str, list[str]] = {}
    for flavor, family in families.items():
        for fault in guarded(check, family):
            owners.setdefault(fault, []).append(flavor)
    return [fault if len(of) == len(families) else f"{', '.join(of)}: {fault}" for fault, of in owners.items()]


def family_of_flavor(name: str, module: ModuleType, flavor: str, overrides: dict[str, Any] | None) -> Family:
    """A flavor of a loaded module. Raises UserError for wrong overrides."""
    return Family(module, overridden(module.FLAVORS[flavor], overrides or {}, list(module.FLAVORS.values()), name))


def choose_small(name: str, module: ModuleType, flavors: list[str], overrides: dict[str, Any] | None = None) -> str | None:
    """The flavor to train: the one the user named, or "debug", or the smallest; None where no flavor can be built.

    Raises UserError where even that is too large.
    """
    sizes = {}
    for flavor in module.FLAVORS:
        with contextlib.suppress(Exception):  # the row "built on meta" reports it
            sizes[flavor] = size_of(family_of_flavor(name, module, flavor, overrides))
    if not sizes:
        return None
    smallest = min(sizes, key=sizes.__getitem__)
    for flavor in [*(flavors if len(flavors) == 1 else []), "debug", smallest]:
        if sizes.get(flavor, SMALL) < SMALL:
            return flavor
    needed = f'checks that train need one of fewer than {SMALL:,}, such as the "debug" of models/llama3.py'
    raise UserError(f"{name}: its smallest flavor, {smallest}, has {sizes[smallest]:,} parameters; {needed}")
