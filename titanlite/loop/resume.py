"""Where a run begins: at step 0, at the newest sound checkpoint, or as a branch of another run; which keys may have changed.

A resumed run must equal the uninterrupted one. Its configuration is compared with the stored one, key by key: most keys
change no later step, some do and must be allowed by name, a few cannot be combined with the old state.
"""

import fnmatch
import itertools
import json
import logging
import math
import shlex
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.tensors import AVERAGES, WEIGHTS, model_tensors
from titanlite.config.conflicts import Conflict, conflicts
from titanlite.config.operation import Checkpoint
from titanlite.config.read import SECTIONS, suggest
from titanlite.config.schema import Config
from titanlite.config.tables import MAY_CHANGE
from titanlite.data.mixture import Data
from titanlite.data.stream import Position
from titanlite.data.timeline import Timeline, stored
from titanlite.ground.errors import UserError, listed
from titanlite.hf.folder import differences, find_weights
from titanlite.hf.load import load_weights
from titanlite.launch.process import of_all_ranks
from titanlite.loop.distillation import digest_of_teacher
from titanlite.loop.divergence import StepRecord
from titanlite.optim import ema
from titanlite.optim.adam_bf16 import REMAINDER
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.lr_schedule import Schedule, build_schedule, phase_faults
from titanlite.optim.own import make_again
from titanlite.optim.state import run_tensors, trained_parameters
from titanlite.parallel.mesh import data_rank
from titanlite.registry.family import Family
from titanlite.registry.own import NAMING, source_of_parts
from titanlite.registry.source import ModelSource, changed_modules, diff, source_of
from titanlite.transforms.parameters import is_adapter

log = logging.getLogger(__name__)

# What the schema says of each key that differs between a checkpoint and the run.
_ON_RESUME = {
    f"{section}.{name}": schema.on_resume(name) for section, schema in SECTIONS.items() for name in schema.model_fields
}
_DATA = "data"  # text and tokenizer, in checkpoint.allow_changes
_SOURCE = "model.source"  # the code of the model and of the user's own parts, there
TEACHER = "teacher"  # its files, there
EXCLUDE = "checkpoint.exclude_from_loading"
# What a run without a checkpoint of its own begins with.
INITIAL = ("checkpoint.initial_load_path", "checkpoint.initial_load_model_only", "checkpoint.initial_load_in_hf")


class RunIdentity(NamedTuple):
    """What a run computes, apart from its weights; a checkpoint is compared with it."""

    config: Config
    family: Family
    data: Data
    global_batch: int  # sequences of a step over all ranks


class Progress(NamedTuple):
    """A run's position in data and schedule, and the losses of which the next report shows the mean."""

    step: int
    timeline: Timeline
    loss_sum: float = 0.0  # of those that are finite, since the last multiple of metrics.log_freq
    loss_count: int = 0
    run: str = ""  # an id that its first start makes, and all its checkpoints have; those of titanlite 0.2 have none
    stream: Position | None = None  # where a stream of the user's own is; other data follows from the timeline

    @property
    def samples(self) -> int:
        """The first sample of the next step."""
        return self.timeline.at(self.step + 1)[1]

    @property
    def loss_mean(self) -> float | None:
        """The mean of these losses; None where there are none."""
        return self.loss_sum / self.loss_count if self.loss_count else None

    def with_losses(self, steps: list[StepRecord], log_freq: int) -> "Progress":
        """Adds the losses of the next steps; the step after a multiple of log_freq begins a new mean."""
        total, count = self.loss_sum, self.loss_count
        for step in steps:
            if (step.number - 1) % log_freq == 0:
                total, count = 0.0, 0
            if step.loss is not None and math.isfinite(step.loss):
                total, count = total + step.loss, count + 1
        return self._replace(loss_sum=total, loss_count=count)


class Change(NamedTuple):
    """A key whose value differs from the checkpoint's."""

    key: str
    before: Any
    now: Any
    diff: str = ""

    def __str__(self) -> str:
        return f"{self.key} = {self.now!r}, was {self.before!r}" + (f"\n{self.diff}" if self.diff else "")


def numbers_of(run: RunIdentity, schedule: Schedule, progress: Progress) -> dict[str, Any]:
    """The state of a run that is not a tensor, for a checkpoint's manifest."""
    return {
        **progress._asdict(),
        "samples": progress.samples,
        "timeline": progress.timeline.numbers(),
        "stream": progress.stream.states if progress.stream else [],
        "global_batch": run.global_batch,
        "data": run.data.describe(),
        "schedule": {"total_steps": schedule.total_steps},  # a longer run keeps it; the rest is in the configuration
        "architecture": run.family.dimensions(),
        "model_source": source_of(run.family.module),
        "own_source": source_of_parts(run.config),
        "teacher": digest_of_teacher(run.config),
        "config": run.config.model_dump(),
    }


def stream_at(state: str, sample: int, mesh: DeviceMesh) -> Position | None:
    """Where the streams of all data ranks are; None without one. All ranks together.

    state: of this rank's stream, as JSON; "" without one. sample: that comes next. Raises UserError where ranks that read the
    same data are at different states.
    """
    if not state:
        return None
    found = of_all_ranks((data_rank(mesh), state))
    by_rank = dict(found)
    if unlike := [number for number, (part, state) in enumerate(found) if by_rank[part] != state]:
        raise UserError(f"rank {unlike[0]}: its stream is at another state than that of the ranks that must read the same rows")
    return Position(sample, [json.loads(by_rank[part]) for part in range(len(by_rank))])


def restore(
    run: RunIdentity, model: nn.Module, optimizer: torch.optim.Optimizer, loss_scale: LossScale | None, folder: Path
) -> tuple[Progress, Schedule]:
    """Loads the state that the run begins with; returns its position and its schedule. All ranks together.

    In this order: the checkpoint that `load_step` names, the newest sound one of this run in `folder`, the one that
    `initial_load_path` names, the initial weights, which the model has already. Raises UserError for a checkpoint that does
    not fit the run, with all its faults.
    """
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    cfg, source = run.config.checkpoint, Path(run.config.checkpoint.initial_load_path)
    begin = own = _own_checkpoint(cfg, folder) if cfg.enable else None
    if begin is None and cfg.initial_load_path and not cfg.initial_load_model_only:
        begin = source, load.verified(source)
    if begin is not None:
        tensors = run_tensors(model, optimizer, loss_scale)
        progress, schedule = load_run(*begin, run, tensors, of_other_stages(model, tensors), not own, (optimizer, model))
        if not own and progress.step >= (steps := run.config.training.steps):
            raise UserError(f"training.steps = {steps}: {source} is at step {progress.step} already; set more steps")
        log.info("resumed from %s", begin[0])
        return progress if own else progress._replace(run=""), schedule
    if cfg.initial_load_path:
        _load_initial_weights(run, source, model)
        if average := ema.ema_of(optimizer):  # not `run_tensors`: it makes an own optimizer's state, which the first step makes
            tensors = model_tensors(model) | average.tensors(model)
            ema.begin_again(tensors, tensors)
        log.info("weights read from %s", source)
    elif run.config.lora.enable:
        # no error: speed, memory and the comparisons of `titanlite verify` do not depend on the weights
        log.warning("lora.enable = true: the weights that are adapted are RANDOM, set checkpoint.initial_load_path")
    return Progress(0, run.data.timeline(run.global_batch)), build_schedule(run.config)


def _load_initial_weights(run: RunIdentity, source: Path, model: nn.Module) -> None:
    """Loads another run's weights, or those of a folder in Hugging Face's format; adapters only where that run had them."""
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    exclude, tensors = run.config.checkpoint.exclude_from_loading, model_tensors(model)
    if run.config.checkpoint.initial_load_in_hf:
        for text in differences(run.family, source).values():
            log.info("the model differs from that of the weights: %s", text)
        weights = find_weights(source, run.family, run.family.on_meta(), exclude)
        load_weights(tensors, {name: entries for name, entries in weights.items() if name in tensors})
        return
    found = load.verified(source)
    for change in run.family.changes_since(found.numbers["architecture"]):
        log.info("the model differs from that of the weights: %s", change)
    then, now = found.numbers["config"].get("lora", {}), run.config.lora
    adapted = then.get("enable")
    if adapted and not now.enable:
        raise UserError(
            f"{source}: its weights have adapters, which lora.enable = false cannot load; begin from an export, "
            "where they are merged, or set lora.enable = true with the same rank and modules"
        )
    if adapted and then["alpha"] != now.alpha and not _matches("lora.alpha", run.config.checkpoint.allow_changes):
        raise UserError(
            f"{source}: its adapters were trained with lora.alpha = {then['alpha']:g}, and lora.alpha = {now.alpha:g} would "
            f"multiply what they have learned. Set it to {then['alpha']:g}, or allow the change: "
            f"{_allow(run.config, ['lora.alpha'])}"
        )
    if not adapted:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    load.load_tensors(source, found, tensors, exclude, "model.", of_other_stages(model, tensors))


def load_run(
    source: Path,
    found: Manifest,
    run: RunIdentity,
    tensors: dict[str, Tensor],
    elsewhere: Collection[str] = (),
    branch: bool = False,
    trained: tuple[torch.optim.Optimizer, torch.nn.Module] | None = None,
) -> tuple[Progress, Schedule]:
    """Loads one checkpoint into `tensors`. elsewhere: names that other ranks load. branch: the checkpoint is another run's.
    trained: what `tensors` are of.

    Raises UserError for a checkpoint that does not fit.
    """
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    manifest.check_run(source, found)
    schedule, progress = check_changes(run, source, found), _progress(run, source, found.numbers)
    patterns = run.config.checkpoint.exclude_from_loading
    # what this run has excluded before, it has trained since
    before = [] if branch else found.numbers["config"]["checkpoint"].get("exclude_from_loading", [])
    exclude = [pattern for pattern in patterns if pattern not in before]
    for pattern in patterns:
        effect = "tensors that match keep their initial values" if pattern in exclude else "took effect before"
        log.info('%s: "%s": %s', EXCLUDE, pattern, effect)
    then = found.numbers["config"].get("optimizer", {}).get("ema_decay", 0.0)
    now = run.config.optimizer.ema_decay
    if bool(then) != bool(now):
        what = "its EMA is dropped" if then else "it has no EMA, which begins with its weights"
        log.info("optimizer.ema_decay = %g, was %g in %s: %s", now, then, source, what)
        exclude = [*exclude, f"{AVERAGES}*"]
    load.load_tensors(source, found, tensors, exclude, elsewhere=elsewhere)
    kept = {name for name in tensors if _matches(name, exclude)}
    ema.begin_again(tensors, kept)
    for name in (name for name in tensors if name.startswith(WEIGHTS) and name in kept):
        if (remainder := tensors.get(f"optimizer.{name.removeprefix(WEIGHTS)}.{REMAINDER}")) is not None:
            remainder.zero_()  # it is that of the weight in the checkpoint
    if trained is not None:
        make_again(trained[0], trained_parameters(*trained), kept)
    return progress, schedule


def _progress(run: RunIdentity, source: Path, numbers: dict[str, Any]) -> Progress:
    """The position from which a run continues; the log says where each source continues if the mixture has changed."""
    earlier = stored(numbers, str(source))
    timeline = earlier.resumed(numbers["step"], run.global_batch, run.data.mixture)
    now = timeline.segments[-1]
    if now.mixture != earlier.segments[-1].mixture:
        for each, before in zip(run.data.sources, now.sources, strict=False):
            log.info("data: another mixture: %s continues after %s of its samples", each.name, f"{before.drawn:,}")
    optional: dict[str, Any] = {name: numbers[name] for name in ("loss_sum", "loss_count", "run") if name in numbers}
    if run.data.stream:  # another stream begins at its beginning
        same = now.mixture == earlier.segments[-1].mixture
        if not same and (read := now.sources[0].drawn):
            raise UserError(
                f"{source}: the run has read {read:,} samples of {run.data.stream.name} before other data. The stream's state "
                "then is not in this checkpoint, so that it would begin again. Begin a new run from the weights: "
                "checkpoint.initial_load_path"
            )
        optional["stream"] = Position(numbers["samples"], numbers.get("stream", []) if same else [])
    return Progress(numbers["step"], timeline, **optional)


def of_other_stages(model: nn.Module, tensors: Iterable[str]) -> Collection[str]:
    """The names of tensors that ranks with other stages of a pipeline load."""
    pipeline = getattr(model, "pipeline", None)
    return pipeline.gathered(tensors) if pipeline is not None else ()


def _own_checkpoint(cfg: Checkpoint, folder: Path) -> tuple[Path, Manifest] | None:
    """The checkpoint of this run to continue from: the newest sound one, or the one that `load_step` names.

    load_step takes effect once: a run continues from what an earlier start with the same load_step has saved. Otherwise a
    scheduler that stops and starts the run would send it back every time.
    """
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    newest = load.newest_sound(folder)
    if newest is not None:
        manifest.check_run(*newest)
    if newest is None or cfg.load_step < 0:
        return newest
    numbers = newest[1].numbers
    if numbers["step"] >= cfg.load_step == numbers["config"]["checkpoint"].get("load_step"):
        log.info("checkpoint.load_step = %d took effect before; to go back again, rename the later checkpoints", cfg.load_step)
        return newest
    source = step_folder(folder, cfg.load_step)
    return source, load.verified(source)


def check_changes(run: RunIdentity, source: Path, found: Manifest) -> Schedule:
    """The schedule of a resumed run, of the length that it had, unless the configuration sets another and it is allowed.

    Raises UserError that lists every impossible or forbidden change.
    """
    config, numbers = run.config, found.numbers
    if reshaped := run.family.changes_since(numbers["architecture"]):
        remedy = (
            "A changed model is another run: give it its own job.dump_folder; checkpoint.initial_load_path and "
            "checkpoint.exclude_from_loading load the weights that still fit"
        )
        title = f"{source}: has another architecture than {config.model.title}:"
        raise UserError(listed(title, reshaped, remedy))
    different = list(changes(run, numbers))
    rules = [(change, _ON_RESUME.get(change.key)) for change in different]
    if impossible := [f"{change}: {rule.refused}" for change, rule in rules if rule]:
        remedy = "Restore the old value, or begin another run from the weights alone: checkpoint.initial_load_path"
        raise UserError(listed(f"{source}: cannot be resumed with", impossible, remedy))
    if refused := [change for change in different if not _matches(change.key, config.checkpoint.allow_changes)]:
        remedy = f"Restore the old value, or allow the change: {_allow(config, [change.key for change in refused])}"
        for change in refused:
            if change.key == "training.global_batch_size" and config.training.global_batch_size == -1:
                keep = f"--training.global_batch_size {change.before}"
                remedy = f"The batch follows from the mesh; to keep it: {keep}\n{remedy}"
        raise UserError(listed(f"{source}: later steps would be computed differently from the earlier ones:", refused, remedy))
    for change in different:
        log.info("changed since the checkpoint, as allowed: %s", change)
    schedule = build_schedule(config, config.lr_scheduler.total_steps or numbers["schedule"]["total_steps"])
    planned = f"lr_scheduler.total_steps = {schedule.total_steps}"
    if unfit := list(phase_faults(config.lr_scheduler, schedule.total_steps, planned)):
        remedy = f"To set another length: --lr_scheduler.total_steps STEPS {_allow(config, ['lr_scheduler.total_steps'])}"
        raise UserError(listed(f"{source}: its schedule, which a resumed run keeps, is too short:", unfit, remedy))
    undecayed = config.decay_steps > 0 and schedule.decay_start >= schedule.decay_end
    if config.training.steps > schedule.total_steps and (undecayed or schedule.at(schedule.total_steps + 1) == 0.0):
        ends = "before its decay" if undecayed else "with a learning rate of 0"
        raise UserError(
            f"training.steps = {config.training.steps}: the schedule of {source} ends at step {schedule.total_steps}, {ends}. "
            f"To stretch it: --lr_scheduler.total_steps {config.training.steps} {_allow(config, ['lr_scheduler.total_steps'])}"
        )
    return schedule


def _allow(config: Config, keys: list[str]) -> str:
    """The option that allows these keys and those allowed already."""
    every = dict.fromkeys([*config.checkpoint.allow_changes, *keys])
    return f"--checkpoint.allow_changes {shlex.quote(','.join(every))}"


def changes(run: RunIdentity, numbers: dict[str, Any]) -> Iterator[Change]:
    """Differences between a checkpoint's numbers and a run that change the mathematics of later steps."""
    before, planned = values_of(numbers), numbers["schedule"]["total_steps"]
    before |= {"training.global_batch_size": numbers["global_batch"], "lr_scheduler.total_steps": planned}
    now = compared(run.config, run.global_batch, run.config.lr_scheduler.total_steps or planned)
    yield from (Change(key, before[key], value) for key, value in now.items() if key in before and before[key] != value)
    yield from data_changes(numbers["data"], run.data.describe())
    then = numbers["model_source"] | numbers.get("own_source", {})
    here = source_of(run.family.module) | source_of_parts(run.config)
    parts = _flat(run.config.model_dump())
    if any(before[key] != parts[key] for key in NAMING):  # other parts have other modules
        then, here = ({name: source for name, source in each.items() if name in then and name in here} for each in (then, here))
    yield from _source_changes(then, here)
    if (teacher := numbers.get("teacher", "")) != (given := digest_of_teacher(run.config)):
        yield Change(TEACHER, teacher, given)


def values_of(numbers: dict[str, Any]) -> dict[str, Any]:
    """The keys of the run that wrote a checkpoint. One that did not exist yet had no effect, which its default expresses."""
    return _flat(Config().model_dump()) | _flat(numbers["config"])


def compared(config: Config, global_batch: int, total_steps: int) -> dict[str, Any]:
    """The keys that a resume may not change, with their values. -1 and an unset length stand for those that were derived:
    global_batch, total_steps."""
    derived = {"training.global_batch_size": global_batch, "lr_scheduler.total_steps": total_steps}
    every = _flat(config.model_dump()) | derived
    return {key: value for key, value in every.items() if _ON_RESUME[key] != MAY_CHANGE}


def loading_of(cfg: Checkpoint, own: bool) -> dict[str, Any]:
    """The keys that decided what a start loaded, for its record; `replay` from before it does not load there.

    own: it resumed from a checkpoint of its run, and did not begin from initial_load_path or from the initial weights.
    """
    return {key: getattr(cfg, key.split(".")[1]) for key in (EXCLUDE, *(() if own else INITIAL))}


def _source_changes(before: ModelSource, now: ModelSource) -> Iterator[Change]:
    """The difference in the code of the model and of the user's own parts."""
    if not (names := changed_modules(before, now)):
        return
    then, here = (
        ", ".join(f"{name} {source[name]['hash'][:12]}" if name in source else f"no {name}" for name in names)
        for source in (before, now)
    )
    yield Change(_SOURCE, then, here, diff(before, now))


def data_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """Differences between two descriptions of data (`Data.describe`), names of sources and paths of files apart."""
    if before["tokenizer"] != now["tokenizer"]:
        yield Change(_DATA, f"tokenizer {before['tokenizer']}", f"tokenizer {now['tokenizer']}")
    for then, source in itertools.zip_longest(before["sources"], now["sources"]):
        if then is None or source is None or {**then, "name": ""} != {**source, "name": ""}:
            yield Change(_DATA, _source_sentence(then, before), _source_sentence(source, now))


def _source_sentence(source: dict[str, Any] | None, data: dict[str, Any]) -> str:
    if source is None:
        return "no such source"
    return (
        f"{source['name']}: {source['tokens']:,} tokens in {source['documents']:,} documents, fingerprint "
        f"{source['fingerprint'][:12]}, {source['share']:.4%} of samples, texts begin with "
        f"{data['beginning']}"
    )


def changeable() -> list[str]:
    """The keys that checkpoint.allow_changes can name."""
    return [*(key for key, rule in _ON_RESUME.items() if rule is None), _DATA, _SOURCE, TEACHER]


def _flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


# ------------------------------------------------------------------------------------------------------------------ the check


_ROLLBACK, _BRANCH = 'training.on_nonfinite = "rollback"', "checkpoint.initial_load_model_only = false"
_CONFLICTS: tuple[Conflict, ...] = (
    (_ROLLBACK, "checkpoint.enable = false", "there is no checkpoint to go back to; set checkpoint.enable = true"),
    (_ROLLBACK, "checkpoint.exclude_from_loading is set", "a rollback loads whole checkpoints; use them in different starts"),
    (_BRANCH, "checkpoint.initial_load_in_hf = true", "a folder in Hugging Face's format holds weights only; set it to true"),
)


def faults(config: Config) -> Iterator[str]:
    """What a run cannot start from or go back to, and changes that cannot be allowed."""
    yield from conflicts(config, _CONFLICTS)
    cfg, source = config.checkpoint, Path(config.checkpoint.initial_load_path)
    started = bool(list_steps(Path(config.job.dump_folder) / cfg.folder))  # then initial_load_path is not read any more
    unlike_ours = not cfg.initial_load_in_hf and not (source / manifest.FILE).is_file()
    if cfg.initial_load_path and unlike_ours and not started:
        is_hf = (source / "config.json").is_file()
        hint = "; it looks like Hugging Face's format: set checkpoint.initial_load_in_hf = true" if is_hf else ""
        yield f'checkpoint.initial_load_path = "{source}": not a checkpoint, such as .../step-00000100{hint}'
    known = changeable()
    for pattern in cfg.allow_changes:
        if not fnmatch.filter(known, pattern):
            yield f'checkpoint.allow_changes: "{pattern}" is no key that must be allowed to change{suggest(pattern, known)}'
