"""The learning rate's formula: warm-up, stable, decay."""

import math

import pytest

from titanlite.config.schema import Config, LRScheduler, Optimizer, Training
from titanlite.optim.lr_schedule import Schedule, build_schedule

_SHAPES = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - progress**0.5,
    "cosine": lambda progress: math.cos(math.pi * progress / 2) ** 2,
}


def _schedule(steps: int, lr: float = 1.0, **keys) -> Schedule:
    config = Config(training=Training(steps=steps), optimizer=Optimizer(lr=lr), lr_scheduler=LRScheduler(**keys))
    return build_schedule(config)


@pytest.mark.parametrize("decay_type", _SHAPES)
@pytest.mark.parametrize("warmup_steps", [0, 60])
@pytest.mark.parametrize("decay_ratio", [None, 0.0, 0.333, 0.4])
@pytest.mark.parametrize("min_lr_factor", [0.0, 0.1])
def test_every_step_equals_an_independent_formula(decay_type, warmup_steps, decay_ratio, min_lr_factor):
    total, lr = 100, 3e-4
    schedule = _schedule(
        total, lr, warmup_steps=warmup_steps, decay_ratio=decay_ratio, decay_type=decay_type, min_lr_factor=min_lr_factor
    )
    decay_steps = total - warmup_steps if decay_ratio is None else round(total * decay_ratio)
    for step in range(1, 131):
        done = step - (total - decay_steps)
        if step <= warmup_steps:
            factor = step / warmup_steps
        elif done < 0 or decay_steps == 0:
            factor = 1.0
        else:
            way = decay_steps + (min_lr_factor == 0)  # 0 is reached after the last step
            factor = min_lr_factor + (1 - min_lr_factor) * _SHAPES[decay_type](min(1.0, done / way))
        assert schedule.at(step) == pytest.approx(lr * factor, rel=1e-12, abs=1e-18), step


def test_total_steps_decides_the_length_for_any_training_steps():
    keys = {"warmup_steps": 5, "decay_ratio": 0.5, "decay_type": "cosine"}
    planned, stopped_early = _schedule(100, **keys), _schedule(30, total_steps=100, **keys)
    assert planned == stopped_early
    assert [planned.at(step) for step in range(1, 101)] == [stopped_early.at(step) for step in range(1, 101)]
