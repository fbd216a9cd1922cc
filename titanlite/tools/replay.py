"""titanlite replay RUN --step N [--ranks RANKS] [--attempt K]

Does one step of a run again, finished or going on, from the newest sound checkpoint before it, and prints its loss and gradient
norm, and layer by layer the norms of gradient, weights and update. Nothing in RUN is changed. Start it where the run was
started, so that paths and model modules are found. It takes one process; with --ranks the run's own mesh on so many, and then
the numbers equal those of the run bit for bit. Where a rollback has led to a step more than once, --attempt counts from 1.
"""

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.checkpoint.manifest import Damaged
from titanlite.config.read import read_config
from titanlite.config.schema import Config, Parallelism, Profiling, Validation
from titanlite.data.batches import read_batches
from titanlite.data.mixture import Data, open_data
from titanlite.errors import UserError
from titanlite.launch import children, process
from titanlite.loop import divergence as incidents
from titanlite.loop.checks import check
from titanlite.loop.divergence import Step, Steps
from titanlite.loop.resume import Progress, load_run, restore
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.lr_schedule import Schedule
from titanlite.optim.state import create_state, run_tensors
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, resolve_degrees
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.registry import family_of
from titanlite.transforms.shards import local_part

log = logging.getLogger(__name__)

_PATIENCE = 3.0  # seconds in which the other ranks are ended once rank 0 has told of what all have met


# ------------------------------------------------------------------------------------------------------- what the run left


class Route(NamedTuple):
    """How a run has come to a step."""

    attempt: int
    attempts: int  # how often it has come to it
    newest: float  # checkpoints of later steps are of later attempts
    jumps: dict[int, int]  # step of a checkpoint that the run has gone back to -> the sample it went on with


def route_to(step: int, attempt: int | None, entries: list[dict[str, Any]]) -> Route:
    """The way to an attempt at a step, the last one unless told otherwise. entries: the lines of incidents.jsonl.

    Raises UserError where there was no such attempt.
    """
    stretches = incidents.stretches(entries)
    attempts = incidents.attempts_at(step, stretches)
    if attempt is not None and not 1 <= attempt <= len(attempts):
        raise UserError(f"--attempt {attempt}: the run has come to step {step} {len(attempts)} times")
    chosen = attempts[-1 if attempt is None else attempt - 1]
    return Route(
        attempts.index(chosen) + 1,
        len(attempts),
        min((stretch.after for stretch in stretches[chosen + 1 :]), default=math.inf),
        {stretch.after: stretch.next_sample for stretch in stretches[1 : chosen + 1] if stretch.next_sample is not None},
    )


def reports_of(run: Path) -> dict[int, dict[str, Any]]:
    """step -> the line of metrics.jsonl; a run that is going on may have written half of the last one."""
    path, found = run / "metrics.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            report = json.loads(line)
            found[report["step"]] = report
        except (ValueError, KeyError, TypeError):
            continue
    return found


def furthest(run: Path, config: Config, entries: list[dict[str, Any]]) -> int:
    """The last step that a run may have done: it does not report every one."""
    known = [*reports_of(run), *(entry["step"] for entry in entries), *list_steps(run / config.checkpoint.folder)]
    return min(config.training.steps, max(known, default=0) + config.metrics.log_freq)


def setting_of(run: Path, step: int) -> tuple[Config, int]:
    """(configuration, global batch size) that a step was done with.

    The first checkpoint after it has them: between two checkpoints there was one start. Else they are of the latest start.
    Raises UserError for what is not the folder of a run.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: there is no config.toml: not the folder of a run")
    config = read_config(str(run / "config.toml"), [])
    saves = run / config.checkpoint.folder
    for later in (number for number in list_steps(saves) if number >= step):
        try:
            numbers = manifest.read(step_folder(saves, later)).numbers
        except UserError as error:
            log.warning("not used: %s", error)
            continue
        return Config.model_validate(numbers["config"]), numbers["global_batch"]
    if config.training.global_batch_size > 0:
        return config, config.training.global_batch_size
    try:
        return config, json.loads((run / "provenance.json").read_text())[-1]["global_batch"]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{run / 'provenance.json'}: does not say how large the global batch was") from None


def on_mesh(config: Config, global_batch: int, ranks: int | None) -> Config:
    """The configuration with the run's own degrees on so many ranks, or on one process, and the same global batch.

    Raises UserError for ranks that cannot hold that mesh or share that batch.
    """
    offload = config.parallelism.cpu_offload and torch.cuda.is_available()
    parallelism = config.parallelism if ranks else Parallelism(data_parallel_shard_degree=1, cpu_offload=offload)
    degrees = resolve_degrees(parallelism, ranks or 1)
    parts = degrees["dp_replicate"] * degrees["dp_shard"]
    if global_batch % parts:
        raise UserError(f"--ranks {ranks}: {parts} data-parallel ranks cannot share a global batch of {global_batch} equally")
    local = math.gcd(config.training.local_batch_size, global_batch // parts)
    if local * parts == global_batch:  # without accumulation it has no effect, and would be refused
        parallelism = parallelism.model_copy(update={"reduce_every_microbatch": True})
    sizes = {"global_batch_size": global_batch, "local_batch_size": local}
    return config.model_copy(
        update={"parallelism": parallelism, "training": config.training.model_copy(update=sizes)}
        | {"validation": Validation(), "profiling": Profiling()}
    )


def check_setting(config: Config, run: Path, ranks: int) -> None:
    """Raises UserError for what this machine cannot do; folders do not matter, since nothing is written."""
    job = config.job.model_copy(update={"dump_folder": tempfile.gettempdir(), "time_limit_minutes": 0.0})
    training = config.training.model_copy(update={"on_nonfinite": "stop"})
    plain = {"job": job, "training": training, "checkpoint": type(config.checkpoint)()}
    check(config.model_copy(update=plain), str(run / "config.toml"), ranks)


# ----------------------------------------------------------------------------------------------------------------- the step


class Layer(NamedTuple):
    """L2 norms of a layer's parameters together."""

    gradient: float  # before clipping
    weights: float  # before the step
    update: float  # of what the step has added


class Replayed(NamedTuple):
    """What is known of a step that was done again."""

    step: Step
    start: str  # what it was reached from
    layers: dict[str, Layer]


def replay(config: Config, run: Path, route: Route, step: int, data: Data, mesh: DeviceMesh, device: torch.device) -> Replayed:
    """Does all steps from the newest sound checkpoint of a route up to a step; all ranks together.

    config: of `on_mesh`. Raises UserError where the data or the model are not those of the run.
    """
    training, parts = config.training, (data_rank(mesh), data_degree(mesh))
    model, optimizer, loss_scale, progress, schedule = begin(config, run, route, step, data, mesh, device)
    given = config.checkpoint.initial_load_path
    if progress.step >= step:
        raise UserError(f"--step {step}: this run began after step {progress.step}, as a branch of {given}")
    beginning = f"the weights of {given}" if given else "the initial weights"
    start = f"the checkpoint of step {progress.step}" if progress.step else beginning
    log.info("from %s: steps %d to %d", start, progress.step + 1, step)
    seat = parts[0] * mesh["tp"].size() + mesh["tp"].get_local_rank()  # as in the loop
    steps, samples, source = Steps(mesh), progress.samples, None
    for number in range(progress.step + 1, step + 1):
        if source is None or number - 1 in route.jumps:
            samples = route.jumps.get(number - 1, samples)
            source = read_batches(config, data, samples, training.global_batch_size, parts, device.type == "cuda")
        process.seed_step(training.seed, number, seat)
        batch = next(source).to(device, non_blocking=True)
        scale = loss_scale and loss_scale.scale
        share = forward_backward(model, batch, mesh, scale, config.parallelism.reduce_every_microbatch)
        if number == step:
            divisor = 1.0 if scale is None else scale.item()
            gradients = norms((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            weights = norms(model.named_parameters())
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
        norm = update(model, optimizer, schedule.at(number), training.max_norm, loss_scale)
        if number == step:
            steps.add(number, samples, share, norm)
        samples += training.global_batch_size
        if number % config.metrics.log_freq == 0:
            log.info("step %d", number)
    moved = norms((name, p.detach() - before[name]) for name, p in model.named_parameters())
    layers = {name: Layer(gradients.get(name, 0.0) / divisor, weights[name], moved[name]) for name in weights}
    return Replayed(steps.read()[0], start, layers)


def begin(
    config: Config, run: Path, route: Route, step: int, data: Data, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, LossScale | None, Progress, Schedule]:
    """The state that a run went on from to a step: its newest sound checkpoint before it, or what the run began with."""
    family = family_of(config.model)
    saves = run / config.checkpoint.folder
    listed = [[number for number in list_steps(saves) if number < step and number <= route.newest]]
    dist.broadcast_object_list(listed)  # the run may be saving and deleting meanwhile
    size = config.training.global_batch_size
    for number in [*reversed(listed[0]), None]:
        # anew for each: a checkpoint that is deleted while it is read leaves half of its tensors
        model = build_model(family, config, mesh, device)
        optimizer = build_optimizer(model, config.optimizer, DTYPES[config.training.mixed_precision_param])
        create_state(optimizer)
        loss_scale = LossScale(device) if config.training.mixed_precision_param == "float16" else None
        if number is None:  # in a folder without checkpoints `restore` begins as a new run does
            found = restore(config, family, data, size, model, optimizer, loss_scale, saves / "none")
            return model, optimizer, loss_scale, *found
        source = step_folder(saves, number)
        try:
            stored = load.verified(source)
            found = load_run(source, stored, config, family, data, size, run_tensors(model, optimizer, loss_scale))
        except Damaged as error:
            log.warning("not used: %s", error)
            continue
        except UserError as error:
            raise UserError(f"{error}\nBut here nothing can be allowed: it would be another step than the run's") from None
        return model, optimizer, loss_scale, *found
    raise AssertionError


@torch.no_grad()
def norms(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Layer -> the L2 norm of its tensors together, over all shards, summed in float64; all ranks together."""
    every = [(name, tensor.numel(), local_part(tensor)) for name, tensor in tensors]
    sums = [local.double().square().sum() for _, _, local in every]
    counts = torch.tensor([local.numel() for _, _, local in every], device=sums[0].device)
    both = torch.stack([torch.stack(sums), counts.double()])
    dist.all_reduce(both)
    squares: dict[str, float] = {}
    for (name, size, _), total, count in zip(every, *both.tolist(), strict=True):
        # each number of a tensor is held by equally many ranks: by count / size
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + total * size / count
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def layer_of(name: str) -> str:
    """ "layers.0" of "layers.0.ffn.w1.weight", "head" of "head.norm.weight"."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: number + 1])


# -------------------------------------------------------------------------------------------------------------- the command


def describe(found: Replayed, run: Path, route: Route, config: Config, mesh: DeviceMesh) -> str:
    """What is printed."""
    step, batch = found.step, config.training.global_batch_size
    used = [f"{name} {mesh[name].size()}" for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
    attempt = f", attempt {route.attempt} of {route.attempts}" if route.attempts > 1 else ""
    lines = [
        f"step {step.number} of {run}{attempt}: samples {step.first_sample} to {step.first_sample + batch - 1}, "
        f"from {found.start}, on {' x '.join(used) or 'one process'}",
        f"{'loss':<14} {step.loss!r}",
        f"{'gradient norm':<14} {step.norm!r}",
    ]
    if route.attempt == route.attempts and (report := reports_of(run).get(step.number)):
        lines.append(f"{'metrics.jsonl':<14} loss {_compared(step.loss, report['loss'])}, gradient norm "
                     f"{_compared(step.norm, report['grad_norm'])}")  # fmt: skip
    width = max(len(name) for name in ["layer", *found.layers])
    lines.append(f"{'layer':<{width}} {'gradient':>12} {'weights':>12} {'update':>12} {'update/weights':>15}")
    for name, layer in found.layers.items():
        ratio = layer.update / layer.weights if layer.weights else math.nan
        lines.append(f"{name:<{width}} {layer.gradient:>12.5g} {layer.weights:>12.5g} {layer.update:>12.5g} {ratio:>15.3g}")
    return "\n".join(lines)


def _compared(found: float, reported: float | None) -> str:
    if reported is None or not math.isfinite(found):
        same = reported is None and not math.isfinite(found)
        return "is not finite there either" if same else f"{reported!r}"
    return "equal" if found == reported else f"{reported!r}, which differs by {abs(found - reported) / abs(reported):.1e}"


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlite replay", allow_abbrev=False, usage=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--attempt", type=int)
    asked = parser.parse_args(words)
    for name in ("step", "ranks", "attempt"):
        if (value := getattr(asked, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    return asked


def _start(asked: argparse.Namespace) -> None:
    """Finds all faults that can be found here, then starts the ranks."""
    config, global_batch = setting_of(asked.run, asked.step)
    entries = incidents.read_entries(asked.run / incidents.FILE)
    if asked.step > (last := furthest(asked.run, config, entries)):
        raise UserError(f"--step {asked.step}: the run in {asked.run} has come to step {last} at most")
    route = route_to(asked.step, asked.attempt, entries)
    config, ranks = on_mesh(config, global_batch, asked.ranks), asked.ranks or 1
    check_setting(config, asked.run, ranks)
    open_data(config)
    # as run_train.sh and torchrun have it: the threads of a rank decide how its sums are rounded
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # that it ends the ranks that are left
    try:
        multiprocessing.spawn(_rank, (ranks, config, asked.run, asked.step, route), nprocs=ranks)
    except multiprocessing.ProcessExitedException as ended:
        sys.exit(ended.exit_code if ended.exit_code > 0 else 1)


def _rank(rank: int, ranks: int, config: Config, run: Path, step: int, route: Route) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    process.set_up_logging()
    children.end_with_parent()
    try:
        device = process.start(config)
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks), device.type)
        found = replay(config, run, route, step, open_data(config), mesh, device)
        if rank == 0:
            print(describe(found, run, route, config, mesh))
        process.finish()
    except UserError as error:
        if rank > 0:
            time.sleep(_PATIENCE)
        print(error, file=sys.stderr, flush=True)
        os._exit(2)  # not sys.exit: the other ranks may be waiting in a collective, and are ended from outside


def main() -> None:
    process.set_up_logging()
    try:
        _start(_parse(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
