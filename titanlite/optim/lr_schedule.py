"""The learning rate as a closed formula of the step: no state to save or restore."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from titanlite.config.schema import Config


class Schedule(NamedTuple):
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395, section 4); steps count from 1."""

    lr: float
    warmup_steps: int
    decay_start: int  # the last step at the full rate
    total_steps: int
    decay_type: str
    min_factor: float
    decay_end: int  # the first step at the minimum; equal to decay_start where nothing decays

    def at(self, step: int) -> float:
        """The learning rate of a step. Step `warmup_steps` has the full rate. From `decay_end` on it stays at the minimum,
        or at the full rate where nothing decays."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if step <= self.decay_start or self.decay_start == self.decay_end:
            return self.lr
        progress = min(1.0, (step - self.decay_start) / (self.decay_end - self.decay_start))
        left = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.lr * (self.min_factor + (1 - self.min_factor) * left)


def build_schedule(config: Config, total_steps: int | None = None) -> Schedule:
    """The schedule of a configuration that has passed `titanlite.loop.checks`.

    total_steps: its length, where that differs from the configuration's, as in an extended run.

    The last step has the minimum. A minimum of 0 comes one step later: a step at rate 0 changes no weight.
    """
    cfg, total = config.lr_scheduler, total_steps or config.schedule_steps
    start = cfg.warmup_steps if cfg.decay_ratio is None else total - round(total * cfg.decay_ratio)
    end = total + 1 if cfg.min_lr_factor == 0 and start < total else total
    return Schedule(config.optimizer.lr, cfg.warmup_steps, start, total, cfg.decay_type, cfg.min_lr_factor, end)


def faults(config: Config) -> Iterator[str]:
    """Phases that do not fit in the schedule, and steps after its end that would change nothing."""
    cfg, total = config.lr_scheduler, config.schedule_steps
    length = f"lr_scheduler.total_steps = {total}" if cfg.total_steps else f"training.steps = {total}"
    decay = 0 if cfg.decay_ratio is None else config.decay_steps
    if cfg.warmup_steps > total:
        yield f"lr_scheduler.warmup_steps = {cfg.warmup_steps}: the schedule ends before, at {length}"
    elif cfg.warmup_steps + decay > total:
        key, warmup = f"lr_scheduler.decay_ratio = {cfg.decay_ratio}", f"lr_scheduler.warmup_steps = {cfg.warmup_steps}"
        yield f"{key}: a decay of {decay} steps and {warmup} do not fit in {length}"
    elif cfg.decay_ratio and not decay:
        yield f"lr_scheduler.decay_ratio = {cfg.decay_ratio}: is less than one step of {length}; set it to 0.0, or higher"
    if config.training.steps > total and cfg.min_lr_factor == 0 and config.decay_steps > 0:
        remedy = "raise lr_scheduler.total_steps or set lr_scheduler.min_lr_factor"
        yield f"training.steps = {config.training.steps}: after {length} the learning rate is 0; {remedy}"
