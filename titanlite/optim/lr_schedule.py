"""The learning rate as a closed formula of the step: no state to save or restore."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from titanlite.checkpoint.folder import list_steps
from titanlite.config.schema import Config, LRScheduler
from titanlite.interfaces import Decay
from titanlite.launch import process
from titanlite.registry import own

_KEY = "lr_scheduler.decay_type"
_PROBES = 100_000  # steps at which a check calls a function of the user's own, evenly spread: a fraction of a second


def _linear(step: int, start: int, end: int) -> float:
    return 1 - (step - start) / (end - start)


def _sqrt(step: int, start: int, end: int) -> float:
    return 1 - math.sqrt((step - start) / (end - start))


def _cosine(step: int, start: int, end: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * ((step - start) / (end - start))))


_DECAYS: dict[str, Decay] = {"linear": _linear, "sqrt": _sqrt, "cosine": _cosine}


class Schedule(NamedTuple):
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395, section 4); steps count from 1."""

    lr: float
    warmup_steps: int
    decay_start: int  # the last step at the full rate
    total_steps: int
    decay_type: str
    decay: Decay
    min_factor: float
    decay_end: int  # the first step at the minimum; equal to decay_start where nothing decays

    def at(self, step: int) -> float:
        """The learning rate of a step. Step `warmup_steps` has the full rate. From `decay_end` on it stays at the minimum,
        or at the full rate where nothing decays."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if step <= self.decay_start or self.decay_start == self.decay_end:
            return self.lr
        left = self.decay(min(step, self.decay_end), self.decay_start, self.decay_end)
        return self.lr * (self.min_factor + (1 - self.min_factor) * left)


def _decay_of(cfg: LRScheduler) -> Decay:
    """The decay of a configuration. One of the user's own raises UserError where it fails, or returns no share.

    Raises UserError where there is no such function, or it does not take these options.
    """
    if ":" not in cfg.decay_type:
        return _DECAYS[cfg.decay_type]
    function = own.with_options(_KEY, cfg.decay_type, ("step", "start", "end"), cfg.options)

    def decay(step: int, start: int, end: int) -> float:
        with own.calling(f'{_KEY} = "{cfg.decay_type}": fails at step {step}'):
            share = function(step, start, end)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise own.fault_of(_KEY, cfg.decay_type, f"returns {share!r} at step {step}; must be a number from 0.0 to 1.0")
        return float(share)

    return decay


def build_schedule(config: Config, total_steps: int | None = None) -> Schedule:
    """The schedule of a configuration that has passed `titanlite.loop.checks`.

    total_steps: its length, where that differs from the configuration's, as in an extended run.

    The last step has the minimum. A minimum of 0 comes one step later: a step at rate 0 changes no weight.
    """
    cfg, total = config.lr_scheduler, total_steps or config.schedule_steps
    start = cfg.warmup_steps if cfg.decay_ratio is None else total - round(total * cfg.decay_ratio)
    end = total + 1 if cfg.min_lr_factor == 0 and start < total else total
    return Schedule(config.optimizer.lr, cfg.warmup_steps, start, total, cfg.decay_type, _decay_of(cfg), cfg.min_lr_factor, end)


def faults(config: Config) -> Iterator[str]:
    """Phases that do not fit in the schedule, and steps after the end that would change nothing.

    Raises UserError for a decay of the user's own that fails.
    """
    cfg, total = config.lr_scheduler, config.schedule_steps
    length = f"lr_scheduler.total_steps = {total}" if cfg.total_steps else f"training.steps = {total}"
    unfit = list(phase_faults(cfg, total, length))
    if cfg.total_steps or not _continues(config):
        yield from unfit
    if ":" in cfg.decay_type and not unfit:
        _check_own(config)
    if config.training.steps > total and build_schedule(config).at(total + 1) == 0:
        remedy = "raise lr_scheduler.total_steps or set lr_scheduler.min_lr_factor"
        yield f"training.steps = {config.training.steps}: after {length} the learning rate is 0; {remedy}"


def phase_faults(cfg: LRScheduler, total: int, length: str) -> Iterator[str]:
    """Phases that do not fit in a schedule of `total` steps. length: what says how many, for messages."""
    decay = round(total * (cfg.decay_ratio or 0.0))
    if cfg.warmup_steps > total:
        yield f"lr_scheduler.warmup_steps = {cfg.warmup_steps}: the schedule ends before, at {length}"
    elif cfg.warmup_steps + decay > total:
        key, warmup = f"lr_scheduler.decay_ratio = {cfg.decay_ratio}", f"lr_scheduler.warmup_steps = {cfg.warmup_steps}"
        yield f"{key}: a decay of {decay} steps and {warmup} do not fit in {length}"
    elif cfg.decay_ratio and not decay:
        yield f"lr_scheduler.decay_ratio = {cfg.decay_ratio}: is less than one step of {length}; set it to 0.0, or higher"


def _continues(config: Config) -> bool:
    """Whether the run begins with another one's schedule, or its own: then the checkpoint says how long it is, which
    titanlite/loop/resume.py checks."""
    cfg = config.checkpoint
    branch = bool(cfg.initial_load_path) and not cfg.initial_load_model_only
    return cfg.enable and (branch or bool(list_steps(Path(config.job.dump_folder) / cfg.folder)))


def _check_own(config: Config) -> None:
    """Raises UserError unless a decay of the user's own gives each probed step a rate, the same one at each call."""
    schedule, name = build_schedule(config), config.lr_scheduler.decay_type
    for step in _probed(schedule, _PROBES):
        if schedule.at(step) != schedule.at(step):
            raise own.fault_of(_KEY, name, f"returns two different values at step {step}")


def _probed(schedule: Schedule, most: int) -> Iterable[int]:
    """Steps of the decay, evenly spread, and its last one."""
    first, last = schedule.decay_start + 1, schedule.decay_end
    return (*range(first, last, 1 + max(0, last - first) // most), last)


def check_ranks(schedule: Schedule, config: Config) -> None:
    """Raises UserError where a decay of the user's own differs between ranks, whose copies of a weight would drift apart; all
    ranks together."""
    cfg = config.lr_scheduler
    # rounded: the C libraries of two nodes may differ in the last bit
    if ":" in cfg.decay_type and not process.same_everywhere(str([f"{schedule.at(n):.9g}" for n in _probed(schedule, 100)])):
        raise own.fault_of(_KEY, cfg.decay_type, "differs between ranks; must depend on its arguments alone")
