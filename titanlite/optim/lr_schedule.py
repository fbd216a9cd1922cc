"""The learning rate as a closed formula of the step: nothing to save, nothing to restore."""

import math
from typing import NamedTuple

from titanlite.config.schema import Config


class Schedule(NamedTuple):
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395, section 4); steps count from 1."""

    lr: float
    warmup_steps: int
    decay_start: int  # the last step before the decay
    total_steps: int
    decay_type: str
    min_factor: float

    def at(self, step: int) -> float:
        """The learning rate of a step. Step `warmup_steps` has the full rate; after `total_steps` it stays at the minimum,
        or where nothing decays, at the full rate."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if step <= self.decay_start or self.decay_start == self.total_steps:
            return self.lr
        if step > self.total_steps:
            return self.lr * self.min_factor
        progress = (step - 1 - self.decay_start) / (self.total_steps - self.decay_start)  # 0 in the first decaying step
        left = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.lr * (self.min_factor + (1 - self.min_factor) * left)


def build_schedule(config: Config, total_steps: int | None = None) -> Schedule:
    """The schedule of a configuration that `titanlite.loop.checks` has let pass.

    total_steps: its length where it is not what the configuration says, as in a run that is extended.
    """
    keys, total = config.lr_scheduler, total_steps or config.schedule_steps
    start = keys.warmup_steps if keys.decay_ratio is None else total - round(total * keys.decay_ratio)
    return Schedule(config.optimizer.lr, keys.warmup_steps, start, total, keys.decay_type, keys.min_lr_factor)
