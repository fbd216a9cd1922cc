"""titanlite replay RUN --step N [--ranks RANKS] [--attempt K] [--model NAME] [--own PART ...]

Repeats one step of a run, whether the run has finished or is still training, from the newest sound checkpoint before that step.
Prints its loss and gradient norm, and for each layer the norms of gradient, weights and update. RUN is only read. Start the
command in the folder where the run was started, so that relative paths are found. --model names the module of the model, if it
is not a family of models/; each --own names a part of your own in the run's configuration, such as my_parts:decay. By default
the command uses one process, and the numbers equal those of the run within rounding, but not those of a model with dropout.
--ranks N uses the mesh of the run on N ranks, and the numbers equal those of the run bit for bit. If rollbacks made the run
repeat a step, --attempt selects one, counted from 1.
"""

import logging
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.checkpoint.manifest import Damaged
from titanlite.config.effects import Hardware
from titanlite.config.operation import Checkpoint, Profiling
from titanlite.config.read import stored_config
from titanlite.config.schema import Config, Parallelism
from titanlite.data.batches import Batches, steps_of
from titanlite.data.mixture import Data, open_data
from titanlite.data.stream import reshard_of
from titanlite.data.timeline import Rollback, attempts_at, stored
from titanlite.ground.errors import UserError, listed
from titanlite.ground.run_files import CONFIG, INCIDENTS, METRICS, PROVENANCE, read_entries, read_reports, read_starts
from titanlite.ground.untrusted import Unread, read_toml
from titanlite.launch import process
from titanlite.launch.layout import share_threads
from titanlite.launch.local_ranks import on_ranks
from titanlite.launch.process import of_first_rank
from titanlite.loop import divergence
from titanlite.loop.checks import check
from titanlite.loop.distillation import digest_of_teacher
from titanlite.loop.divergence import StepRecord
from titanlite.loop.resume import (
    EXCLUDE,
    INITIAL,
    TEACHER,
    Progress,
    RunIdentity,
    compared,
    data_changes,
    load_run,
    loading_of,
    of_other_stages,
    restore,
)
from titanlite.optim.build import replication_factor
from titanlite.optim.lr_schedule import Schedule
from titanlite.optim.state import run_tensors
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, mesh_title, parts_of, resolve_degrees, stage_group
from titanlite.registry.family import family_of, trusted, vocabulary_of
from titanlite.registry.own import parts_of as named_parts
from titanlite.registry.own import source_of_parts, without_reports
from titanlite.registry.source import ModelSource, changed_modules, diff, source_of
from titanlite.tools.options import LOCAL_RANKS, STEPS, command_parser, existing_folder, nonempty
from titanlite.transforms.shards import local_part
from titanlite.verify.compare import Run, begin, dropouts, follow, on_mesh, relative_difference, replaced

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------- what the run left


class Route(NamedTuple):
    """How a run reached a step: which attempt, after which rollbacks."""

    attempt: int
    attempts: int  # how often the run reached the step
    newest: float  # checkpoints of later steps belong to later attempts
    rollbacks: list[Rollback]  # those before this attempt


def route_to(step: int, attempt: int | None, entries: list[dict[str, Any]]) -> Route:
    """The route to an attempt at a step, by default the last one. entries: the lines of incidents.jsonl.

    Raises UserError where there was no such attempt.
    """
    rollbacks = divergence.rollbacks(entries)
    attempts = attempts_at(step, rollbacks)
    if attempt is not None and not 1 <= attempt <= len(attempts):
        raise UserError(f"--attempt {attempt}: the run reached step {step} {len(attempts)} times")
    before = attempts[-1 if attempt is None else attempt - 1]
    newest = min((rollback.to_step for rollback in rollbacks[before:]), default=math.inf)
    return Route(attempts.index(before) + 1, len(attempts), newest, rollbacks[:before])


def reports_of(run: Path) -> dict[int, dict[str, Any]]:
    """step -> its line of metrics.jsonl. While a run trains, the last line may be incomplete."""
    return {report["step"]: report for report in read_reports(run / METRICS)}


def furthest(run: Path, config: Config, entries: list[dict[str, Any]]) -> int:
    """The last step that a run may have done; not every step is reported."""
    known = [*reports_of(run), *(entry["step"] for entry in entries), *list_steps(run / config.checkpoint.folder)]
    return min(config.training.steps, max(known, default=0) + config.metrics.log_freq)


def setting_of(run: Path, step: int, named: str = "", own: Collection[str] = ()) -> tuple[Config, int]:
    """(configuration, global batch size) of a step. named: as for `trusted`. own: as for `check_trust`.

    The first checkpoint at or after the step holds them: between two checkpoints a run has one configuration. Without such a
    checkpoint they are those of the latest start. Raises UserError for a folder that is no run directory.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: there is no {CONFIG}: not the folder of a run")
    config = stored_config(read_toml(run / CONFIG), run / CONFIG)
    numbers = saved_after(step, run / config.checkpoint.folder) or {"global_batch": config.training.global_batch_size}
    if "config" in numbers:
        config = stored_config(numbers["config"], run)
    config = without_reports(trusted(config, run, named))
    check_trust(config, run, own)
    batch = numbers["global_batch"] if numbers["global_batch"] > 0 else latest_start(run).get("global_batch")
    if batch is None:
        raise UserError(f"{run / PROVENANCE}: does not contain the global batch size")
    return config, batch


def check_trust(config: Config, source: Path, named: Collection[str]) -> None:
    """Raises UserError for a part that a file names but the user's command does not, or vice versa.

    named: the parts that the command names.
    """
    parts = named_parts(config)
    for key, name in parts.items():
        if name not in named:
            raise UserError(f'{source}: {key} = "{name}": no code that a file names is run; if you trust it, add --own {name}')
    if unused := [name for name in named if name not in parts.values()]:
        raise UserError(f"--own {unused[0]}: {source} names no such part; remove the option")


def saved_after(step: int, saves: Path) -> dict[str, Any]:
    """The numbers of the first readable checkpoint at or after a step; empty if there is none."""
    for later in (number for number in list_steps(saves) if number >= step):
        try:
            return manifest.read(step_folder(saves, later)).numbers
        except UserError as error:
            log.warning("not used: %s", error)
    return {}


def latest_start(run: Path) -> dict[str, Any]:
    """The last entry of a run's provenance.json; empty if it has none. Raises UserError for a file that is none."""
    starts = read_starts(run)
    return starts[-1] if starts else {}


def _code_of(stored: dict[str, Any]) -> ModelSource:
    """The code in a manifest or a start."""
    return (stored.get("model_source") or {}) | stored.get("own_source", {})


def check_source(step: int, run: Path, numbers: dict[str, Any], now: ModelSource) -> None:
    """Raises UserError if the run did a step with other code. numbers: of `saved_after`; empty: the latest start counts."""
    found = numbers or latest_start(run)
    before = _code_of(found)
    if before and changed_modules(before, now):
        remedy = "Restore that code: the repeated step would differ from that of the run"
        title = f"--step {step}: the code of the model has changed since the run did this step:"
        raise UserError(f"{title}\n{diff(before, now)}\n{remedy}")


def check_data(step: int, run: Path, numbers: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError if the run did a step with other text or another tokenizer. numbers: as for `check_source`. now: as
    `Data.describe`."""
    before = (numbers or latest_start(run)).get("data")
    if before and (different := [str(change) for change in data_changes(before, now)]):
        title = f"--step {step}: the data has changed since the run did this step:"
        raise UserError(listed(title, different, "Restore that data: the repeated step would read other samples"))


def replay_config(config: Config, global_batch: int, ranks: int | None) -> Config:
    """The configuration on the mesh of the run with this many ranks, or on one process; the global batch stays the same.

    Raises UserError for ranks that cannot hold that mesh or share that batch.
    """
    config = config.settled(Hardware(torch.cuda.is_available()))
    alone = Parallelism(data_parallel_shard_degree=1, cpu_offload=config.parallelism.cpu_offload)
    parallelism = config.parallelism if ranks else alone
    degrees = resolve_degrees(parallelism, ranks or 1)
    if global_batch % (parts := parts_of(degrees)):
        raise UserError(f"--ranks {ranks}: {parts} data-parallel ranks cannot share a global batch of {global_batch} equally")
    degrees["ep"] = parallelism.expert_parallel_degree
    config = replaced(config, parallelism=parallelism, profiling=Profiling())
    # it has no effect on one process, but checkpoints are compared by it
    reduce = {"training.mixed_precision_reduce": config.training.mixed_precision_reduce}
    return on_mesh(config, degrees, global_batch).with_keys(reduce)


def check_setting(config: Config, run: Path, ranks: int) -> None:
    """Raises UserError for a run that this machine cannot repeat. Folders do not matter: replay writes nothing."""
    if 0 < torch.cuda.device_count() < ranks:
        raise UserError(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs, and each rank needs one")
    nowhere = os.path.join(tempfile.gettempdir(), f"titanlite-replay-{os.getpid()}")
    job = {"dump_folder": nowhere, "time_limit_minutes": 0.0}
    config = replaced(config, job=job, training={"on_nonfinite": "stop"}, checkpoint=Checkpoint())
    if not config.lr_scheduler.total_steps:  # a resume may have changed training.steps, and not the length of the schedule
        length = latest_start(run).get("compared", {}).get("lr_scheduler.total_steps", 0)
        config = config.with_keys({"lr_scheduler.total_steps": length})
    check(config, str(run / CONFIG), ranks)


# ----------------------------------------------------------------------------------------------------------------- the step


class Norms(NamedTuple):
    """L2 norms over all parameters of a layer."""

    gradient: float  # before clipping
    weights: float  # before the step
    update: float  # what the step added


class Replayed(NamedTuple):
    """A repeated step."""

    step: StepRecord
    start: str  # what the replay started from, as text
    layers: dict[str, Norms]
    other_mesh: str = ""  # that of the run, where dropout drew other numbers than here


def replay(
    config: Config, folder: Path, route: Route, step: int, data: Data, mesh: DeviceMesh, device: torch.device
) -> Replayed:
    """Repeats all steps from the newest sound checkpoint of a route up to `step`; all ranks together.

    config: of `replay_config`. Raises UserError where the data or the model are not those of the run.
    """
    later = saved_after(step, folder / config.checkpoint.folder)
    source = source_of(family_of(config.model).module) | source_of_parts(config)
    check_source(step, folder, later, source)
    check_data(step, folder, later, data.describe())
    run, progress, schedule = begin_before(step, config, folder, route, data, mesh, device)
    now = compared(config, config.training.global_batch_size, schedule.total_steps)
    now |= {TEACHER: digest_of_teacher(config), **loading_of(config.checkpoint, own=False)}
    starts = read_starts(folder)
    check_between(progress.step, step, starts, now, source, data.describe())
    timeline = progress.timeline.after(progress.step, route.rollbacks)
    here, there = (each.at(step)[0] for each in (timeline, stored(later, "the next checkpoint") if later else timeline))
    if (here.global_batch, here.mixture, here.began) != (there.global_batch, there.mixture, there.began):
        changed = f"sources, weights or the global batch changed after step {progress.step}, and the checkpoint there is gone"
        raise UserError(f"--step {step}: {changed} or damaged; from an earlier one, other samples would be read")
    if data.stream and not (progress.stream and progress.stream.states):  # it begins, and other ranks would read other rows
        degree = data_degree(mesh)
        for number, _ in _computing(progress.step, step, starts):
            if (then := starts[number].get("data_degree")) not in (None, degree):
                reshard_of(data.stream, f"the run had {then} data ranks, and the replay has {degree}")
    given = config.checkpoint.initial_load_path
    if progress.step >= step:
        raise UserError(f"--step {step}: this run started after step {progress.step}, as a branch of {given}")
    origin = f"the weights of {given}" if given else "the initial weights"
    start = f"the checkpoint of step {progress.step}" if progress.step else origin
    log.info("from %s: steps %d to %d", start, progress.step + 1, step)
    part = data_rank(mesh), data_degree(mesh)
    batches = Batches(steps_of(config, data, part, timeline, progress.step + 1, progress.stream), device)
    for number, _ in follow(run, schedule, batches, range(progress.step + 1, step + 1)):
        if number % config.metrics.log_freq == 0:
            log.info("step %d", number)
        if number == step:
            gradients = layer_norms(run, run.gradients())
            before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    weights = layer_norms(run, before.items())
    updates = layer_norms(run, ((name, p.detach() - before[name]) for name, p in run.model.named_parameters()))
    layers = {name: Norms(gradients.get(name, 0.0), weights[name], updates[name]) for name in weights}
    other_mesh = ""
    if dropouts(family_of(config.model).on_meta()):
        meshes = [starts[number].get("values", {}).get("mesh") for number, _ in _computing(progress.step, step, starts)]
        other_mesh = next((mesh_then for mesh_then in meshes if mesh_then not in (None, mesh_title(mesh))), "")
    return Replayed(run.steps.read()[-1]._replace(first_sample=timeline.at(step)[1]), start, layers, other_mesh)


def _computing(before: int, step: int, starts: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """(number, last step) of each start that computed steps after `before`, up to `step`, from which the run went on."""
    for number, start in enumerate(starts):
        last = min([step, *(each.get("resumed_step", 0) for each in starts[number + 1 :])])  # a later start went on from there
        if max(start.get("resumed_step", 0), before) < last:
            yield number, last


def check_between(
    before: int, step: int, starts: list[dict[str, Any]], now: dict[str, Any], source: ModelSource, data: dict[str, Any]
) -> None:
    """Raises UserError where a start of the run computed steps after `before`, up to `step`, with other values, code or data,
    or loaded other tensors: a checkpoint between is gone. starts: of provenance.json. now: as `compared`, with the digest of
    the teacher and the keys of `loading_of`. data: as `Data.describe`."""
    for number, last in _computing(before, step, starts):
        start = starts[number]
        then, code = start.get("compared", {}), _code_of(start)  # an earlier version wrote no values
        then = then | {TEACHER: start[TEACHER]} if TEACHER in start else then
        different = [f"{key} = {value!r}, was {then[key]!r}" for key, value in now.items() if then.get(key, value) != value]
        different += [f"the code of {name}" for name in changed_modules(code, source) if code]
        different += [str(change) for change in data_changes(start["data"], data)] if start.get("data") else []
        different += _loaded_otherwise(starts[: number + 1], before, now)
        if different:
            title = f"--step {step}: the steps up to {last} were computed with other values, and a checkpoint between is gone:"
            raise UserError(listed(title, different))


def _loaded_otherwise(starts: list[dict[str, Any]], before: int, now: dict[str, Any]) -> list[str]:
    """What the last of these starts loaded otherwise than a replay that begins with the state of step `before`."""
    *earlier, start = starts
    begun, loading = start.get("resumed_step", 0), start.get("loading", {})
    excluded, now_excluded = ({*each.get(EXCLUDE, [])} for each in (loading, now))
    wrote = [each for each in earlier if each.get("resumed_step", 0) < begun]
    # patterns take effect that the start which wrote the checkpoint did not have, as in `load_run`
    applied = {*wrote[-1].get("loading", {}).get(EXCLUDE, [])} if wrote else set()
    if begun > before:
        fresh = sorted(excluded - applied)
        return [f"{EXCLUDE} = {fresh!r} at the resume from step {begun}"] if fresh else []
    if begun < before:  # further patterns of a later start would take effect here
        keys = [EXCLUDE] if now_excluded - excluded else []
    elif INITIAL[0] not in loading:
        keys = [EXCLUDE] if now_excluded - applied != excluded - applied else []
    else:  # without initial_load_path nothing was loaded
        keys = [INITIAL[0]] if loading[INITIAL[0]] == "" else [*loading]
    return [f"{key} = {now[key]!r}, was {loading[key]!r}" for key in keys if key in loading and loading[key] != now[key]]


def begin_before(
    step: int, config: Config, folder: Path, route: Route, data: Data, mesh: DeviceMesh, device: torch.device
) -> tuple[Run, Progress, Schedule]:
    """The state before a step from which the run continued: its newest sound checkpoint, or what the run started with."""
    setting = RunIdentity(config, family_of(config.model), data, config.training.global_batch_size)
    saves = folder / config.checkpoint.folder
    before = [number for number in list_steps(saves) if number < step and number <= route.newest]
    # of the first rank: a run that is still training saves and deletes checkpoints meanwhile
    for number in [*reversed(of_first_rank(before)), None]:
        run = begin(config, mesh, device)  # a new one each time: a checkpoint that is deleted during a read leaves mixed state
        state = run.model, run.optimizer, run.loss_scale
        if number is None:  # a folder without checkpoints, with which `restore` starts a new run
            return run, *restore(setting, *state, saves / "none")
        source = step_folder(saves, number)
        try:
            tensors = run_tensors(*state)
            others, found = of_other_stages(run.model, tensors), load.verified(source)
            return run, *load_run(source, found, setting, tensors, others, trained=(run.optimizer, run.model))
        except Damaged as error:
            log.warning("not used: %s", error)
        except Unread:
            raise
        except UserError as error:
            raise UserError(f"{error}\nReplay cannot allow changes: the step would differ from that of the run") from None
    raise AssertionError


@torch.no_grad()
def layer_norms(run: Run, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Layer -> the L2 norm over its tensors, all their shards and all stages, summed in float64; all ranks together."""
    stages = run.mesh["pp"].size()
    squares = {name: local_part(t).double().square().sum() / (replication_factor(t) // stages) for name, t in tensors}
    sums = torch.stack([*squares.values()])
    dist.all_reduce(sums, group=stage_group(run.mesh))
    by_layer: dict[str, float] = {}
    for name, square in run.of_all_stages(dict(zip(squares, sums.cpu(), strict=True))).items():
        by_layer[layer_of(name)] = by_layer.get(layer_of(name), 0.0) + square.item()
    return {name: math.sqrt(total) for name, total in by_layer.items()}


def layer_of(name: str) -> str:
    """ "layers.0" of "layers.0.ffn.w1.weight", "head" of "head.norm.weight"."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: number + 1])


# -------------------------------------------------------------------------------------------------------------- the command


def describe(replayed: Replayed, run: Path, route: Route, config: Config, mesh: DeviceMesh) -> str:
    """The text that the command prints."""
    step, batch = replayed.step, config.training.global_batch_size
    attempt = f", attempt {route.attempt} of {route.attempts}" if route.attempts > 1 else ""
    lines = [
        f"step {step.number} of {run}{attempt}: samples {step.first_sample} to {step.first_sample + batch - 1}, "
        f"from {replayed.start}, on {mesh_title(mesh)}",
        f"{'loss':<14} {step.loss!r}",
        f"{'gradient norm':<14} {step.norm!r}",
    ]
    report = reports_of(run).get(step.number, {})
    if route.attempt == route.attempts and {"loss", "grad_norm"} <= report.keys():
        loss, norm = _compared(step.loss, report["loss"]), _compared(step.norm, report["grad_norm"])
        lines.append(f"{'metrics.jsonl':<14} loss {loss}, gradient norm {norm}")
    if replayed.other_mesh:
        other = f"the run's mesh was {replayed.other_mesh}, where the model's dropout drew other numbers"
        lines.append(f"{'not equal':<14} {other}: differences are larger than rounding; --ranks repeats that mesh")
    width = max(len(name) for name in ["layer", *replayed.layers])
    lines.append(f"{'layer':<{width}} {'gradient':>12} {'weights':>12} {'update':>12} {'update/weights':>15}")
    for name, layer in replayed.layers.items():
        ratio = layer.update / layer.weights if layer.weights else math.nan
        lines.append(f"{name:<{width}} {layer.gradient:>12.5g} {layer.weights:>12.5g} {layer.update:>12.5g} {ratio:>15.3g}")
    return "\n".join(lines)


def _compared(value: float | None, reported: float | None) -> str:
    """A value compared with that of metrics.jsonl, which is None if it was not finite. value None: the step has no labels."""
    if value is None:
        return f"{reported!r} without labels"
    if reported is None:
        return "is not finite there" + ("" if math.isfinite(value) else " either")
    difference = relative_difference(value, reported)
    return f"{reported!r}, which differs by {difference:.1e}" if difference else "equal"


def _on_rank(device: torch.device, config: Config, run: Path, step: int, route: Route) -> str:
    process.set_up_logging()
    if config.training.deterministic:
        process.use_deterministic_algorithms()
    mesh = build_mesh(resolve_degrees(config.parallelism, dist.get_world_size()), device.type)
    replayed = replay(config, run, route, step, open_data(config, vocabulary_of(config.model)), mesh, device)
    return describe(replayed, run, route, config, mesh)


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    parser = command_parser("replay", __doc__)
    parser.add_argument("run", type=existing_folder, help="the run directory")
    parser.add_argument("--step", type=STEPS, required=True)
    parser.add_argument("--ranks", type=LOCAL_RANKS, help="(default: one process without the mesh of the run)")
    parser.add_argument("--attempt", type=STEPS, help="(default: the last one)")
    parser.add_argument("--model", type=nonempty, help="module of the model, if it is not a family of models/")
    parser.add_argument("--own", type=nonempty, action="append", default=[], help="part of your own that the run names")
    options = parser.parse_args()
    process.set_up_logging()
    run, step, ranks = options.run, options.step, options.ranks or 1
    config, global_batch = setting_of(run, step, options.model or "", options.own)
    entries = read_entries(run / INCIDENTS)
    if step > (last := furthest(run, config, entries)):
        raise UserError(f"--step {step}: the run in {run} reached step {last} at most")
    route = route_to(step, options.attempt, entries)
    config = replay_config(config, global_batch, options.ranks)
    check_setting(config, run, ranks)
    open_data(config, vocabulary_of(config.model))  # fills the cache for the ranks
    # As in run_train.sh: the number of threads of a rank decides how its sums are rounded.
    share_threads(ranks)
    timeout = config.comm.init_timeout_seconds
    print(on_ranks(ranks, _on_rank, config, run, step, route, timeout_seconds=timeout))
