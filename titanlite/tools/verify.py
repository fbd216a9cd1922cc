"""titanlite verify CONFIG.toml [--mesh 1 --mesh "dp_shard=2,tp=2" ...] [--steps 5] [--section.key value ...]

Trains your own configuration for a few steps on each mesh, in float32 without float8 and without the model's dropout layers,
which draw other numbers on every mesh, and compares every mesh with the first one: initial weights, global batches, losses,
gradient norms, and the gradient of every parameter. The table names what differs. Scale a large model down with --model.flavor
or other options: the command tests the mesh. A flavor with fewer tokens than your tokenizer also needs
--model.overrides.vocab_size N.

The tolerance of a gradient is 1e-5 of its norm, or ten times what rounding alone changes on the first mesh, and at most 5e-3. A
larger difference that rounding may explain is measured again in float64. Exit code 0: equal; 1: not equal; 2: a user error, or
an error of the model's code; 3: undecided: a difference may be rounding.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.operation import Checkpoint
from titanlite.config.read import Faults, read_config
from titanlite.config.schema import Config, Float8, Model, Optimizer
from titanlite.data.mixture import open_data
from titanlite.ground.errors import UserError
from titanlite.launch.local_ranks import on_ranks
from titanlite.loop.checks import check
from titanlite.loop.own_code import OwnCode
from titanlite.parallel.mesh import DEGREES, build_mesh, parts_of, ranks_of
from titanlite.registry import own
from titanlite.registry.family import family_of, vocabulary_of
from titanlite.tools.options import STEPS, command_parser, nonempty
from titanlite.verify.compare import (
    Comparison,
    Run,
    Trajectory,
    after_building,
    batches_of,
    begin,
    compare,
    meshes_of,
    on_mesh,
    record_run,
    replaced,
    without_dropout,
)
from titanlite.verify.rounding import FLOAT64, gradients_in_float64, noise_of, settle, tolerances
from titanlite.verify.small_runs import describe


def main() -> None:
    """Exit code 0: equal; 1: not equal; 2: a user error; 3: undecided."""
    path, given, config = _parse(sys.argv[1:])
    meshes = checked(path, given, config)
    # all on GPUs or none, since kernels of two devices round differently
    gpus, most = torch.cuda.device_count(), max(ranks_of(degrees) for _, degrees in meshes)
    if 0 < gpus < most:
        print(f"on CPUs: this machine has {gpus} GPUs, and a mesh {most} ranks")
    meshes = [(each.settled(Hardware(gpus >= most)), degrees) for each, degrees in meshes]
    run = functools.partial(_run, gpus >= most)
    open_data(config, vocabulary_of(config.model))  # fills the cache for the ranks
    first, *others = meshes
    reference = run(_record, *first, True)
    found = [reference, *(run(_record, *each) for each in others)]
    comparisons = [compare(each, reference) for each in found]
    print(f"{config.model.title}, {config.training.steps} steps in float32, each mesh compared with the first")
    for line in tolerances(comparisons[0]):
        print(line)
    print(f"{'mesh':<28} {'weights':<9} {'batches':<9} {'losses':<9} {'norms':<17} {'worst gradient'}")
    in_float64 = functools.cache(lambda: run(_gradients, *first))
    verdicts = []
    for mesh, trajectory, comparison in zip(meshes, found, comparisons, strict=True):
        result, remark = comparison, ""
        if comparison.undecided:
            try:
                wide = run(_gradients, *mesh), in_float64()
                result = settle(trajectory, reference, *wide)
                remark = f"in float64: {result.worst('gradients').size:.1e} {result.worst('gradients').where}"
            except UserError as error:
                remark = f"the model does not run in float64: {error}"
        verdicts.append("" if result.equal else "undecided" if result.undecided else "not equal")
        _print_row(mesh[1], comparison, verdicts[-1])
        for line in [remark, *describe(result)] if remark else describe(result):
            print(f"    {line}")
    words = {"not equal": "NOT equal", "undecided": "undecided: a difference shrinks in float64, but not far enough"}
    worst = next((verdict for verdict in words if verdict in verdicts), "")
    print("\n".join([words.get(worst, "equal within float32 rounding"), *(own_parts(config) if worst else [])]))
    sys.exit({"": 0, "not equal": 1, "undecided": 3}[worst])


def checked(path: str, given: list[dict[str, int]], config: Config) -> list[tuple[Config, dict[str, int]]]:
    """(the configuration on a mesh, the mesh) for one process and for each mesh of check-model that it does not refuse.

    given: these meshes instead, of which it may refuse none. Raises Faults.
    """
    every = given or [{}, *meshes_of(family_of(config.model).on_meta()).values()]
    global_batch = config.global_batch(max(map(parts_of, every)))  # that of the mesh with the most data-parallel ranks
    found = []
    for degrees in every:
        on = on_mesh(config, degrees, global_batch)
        try:
            check(on, path, ranks_of(degrees))
        except Faults as refused:
            if given or not degrees:
                raise
            print(f"{_name(degrees)} is left out: {refused.faults[0]}")
        else:
            found.append((on, degrees))
    if len(found) == 1:
        raise UserError(f"{path}: no mesh is left to compare with one process; name meshes with --mesh")
    return found


def own_parts(config: Config) -> list[str]:
    """A line with the location of each of the user's own parts, which may cause the difference."""
    parts = own.parts_of(config).items()
    return [f'{key} = "{name}" ({own.place(own.part_of(key, name))}): computes the same on every mesh?' for key, name in parts]


def _name(degrees: dict[str, int]) -> str:
    """The mesh as the option --mesh has it."""
    return ",".join(f"{key}={degree}" for key, degree in degrees.items()) or "1"


def _print_row(degrees: dict[str, int], comparison: Comparison, verdict: str) -> None:
    weights, batches = ("differ" if comparison.worst(quantity).size else "equal" for quantity in ("weights", "batches"))
    loss, gradient = comparison.worst("losses"), comparison.worst("gradients")
    norms = f"{comparison.of('norms')[0].size:.1e}, {comparison.worst('norms').size:.1e}"
    name, verdict = _name(degrees), f"  <- {verdict}" if verdict else ""
    print(f"{name:<28} {weights:<9} {batches:<9} {loss.size:<9.1e} {norms:<17} {gradient.size:.1e} {gradient.where}{verdict}")


def _run(use_gpus: bool, function: Callable[..., Any], config: Config, degrees: dict[str, int], *more: Any) -> Any:
    """The result of a function on a mesh of processes on this machine. Raises UserError, with the mesh, for an error there."""
    timeout = config.comm.init_timeout_seconds
    try:
        count = ranks_of(degrees)
        return on_ranks(count, function, config, degrees, *more, timeout_seconds=timeout, use_gpus=use_gpus)
    except UserError as error:
        raise UserError(f"mesh {_name(degrees)}: {error}") from None


def _record(device: torch.device, config: Config, degrees: dict[str, int], with_noise: bool = False) -> Trajectory:
    data, mesh = open_data(config, vocabulary_of(config.model)), build_mesh(degrees, device.type)
    trajectory = record_run(_fresh(config, mesh, device), batches_of(config, data, mesh))
    if not with_noise:
        return trajectory
    batch = next(iter(batches_of(config, data, mesh)))
    return trajectory._replace(noise=noise_of(functools.partial(_begun, config, mesh, device), batch))


def _fresh(config: Config, mesh: DeviceMesh, device: torch.device) -> Run:
    """A run before its first step; `verify` begins each with it."""
    run = begin(config, mesh, device)
    without_dropout(run.model)
    return run


def _begun(config: Config, mesh: DeviceMesh, device: torch.device) -> Run:
    """A run before its first forward pass, with what the user's hooks have changed in its model."""
    run = after_building(_fresh(config, mesh, device))
    OwnCode(config, metrics=False).at_step("before_step", 1, run.model, run.optimizer)
    return run


def _gradients(device: torch.device, config: Config, degrees: dict[str, int]) -> dict[str, Tensor]:
    """The gradients of the first step, in float64."""
    config, mesh = replaced(config, **FLOAT64), build_mesh(degrees, device.type)
    data = open_data(config, vocabulary_of(config.model))
    return gradients_in_float64(functools.partial(_begun, config, mesh, device), lambda _: iter(batches_of(config, data, mesh)))


def _parse(words: list[str]) -> tuple[str, list[dict[str, int]], Config]:
    """(configuration file, meshes of --mesh, configuration in float32)."""
    parser = command_parser("verify", __doc__)
    parser.add_argument("config", type=nonempty)
    parser.add_argument("--mesh", type=nonempty, action="append", help="1, or dp_shard=2,tp=2 (default: those of check-model)")
    parser.add_argument("--steps", type=STEPS, help="(default: 5, or training.steps if that is less)")
    known, options = parser.parse_known_args(words)
    config = read_config(known.config, options)
    if idle := [*effects.faults(config.idle(Hardware()))]:  # before the lines below change these keys
        raise Faults(known.config, idle)
    if known.mesh is not None and len(known.mesh) < 2:
        raise UserError("give at least two meshes, as in --mesh 1 --mesh dp_shard=2,tp=2")
    if known.mesh is not None and _degrees(known.mesh[0]).get("pp", 1) > 1:
        raise UserError(f'--mesh "{known.mesh[0]}": the first mesh, the reference, has no pipeline; begin with --mesh 1')
    steps = known.steps or min(5, config.training.steps)
    float32 = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float32")
    config = replaced(
        config,
        training={"steps": steps, "on_nonfinite": "stop", **float32},  # so that rounding is the only difference
        lr_scheduler={"total_steps": max(steps, config.schedule_steps)},  # the schedule of the full run, if it has the steps
        # These keys apply to one precision.
        optimizer={"rounding": Optimizer().rounding},
        model={"attention": Model().attention},
        float8=config.float8 if config.float8.emulate else Float8(),
        checkpoint=Checkpoint(),
    )
    return known.config, [_degrees(text) for text in known.mesh or ()], config


def _degrees(text: str) -> dict[str, int]:
    """{"dp_shard": 2, "tp": 2} of "dp_shard=2,tp=2", {} of "1"."""
    if text == "1":
        return {}
    degrees = {}
    for part in text.split(","):
        name, _, degree = part.partition("=")
        if name not in DEGREES or name in degrees or not degree.isdecimal() or int(degree) < 1:
            raise UserError(f'--mesh "{text}": must be 1, or degrees of {", ".join(DEGREES)}, each once, as in dp_shard=2,tp=2')
        degrees[name] = int(degree)
    return degrees
