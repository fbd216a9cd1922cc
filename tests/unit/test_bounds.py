"""Every number that a key allows is a normal number in float32 and bfloat16, and so are products with other keys."""

import functools
import itertools
import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tests.hostile.keys import ALTERNATIVES, alternatives
from titanlite.config.schema import Config, Source
from titanlite.optim.lr_schedule import build_schedule

TINY = torch.finfo(torch.float32).tiny
_OF_SOURCES = {f"source.{name}": alternatives(Source, name) for name in Source.model_fields}
FLOATS = {key: each for key, kinds in (ALTERNATIVES | _OF_SOURCES).items() for each in kinds if each["type"] == "number"}


@functools.cache
def adapter(key: str) -> TypeAdapter:
    section, name = key.split(".")
    fields = Source.model_fields if section == "source" else type(getattr(Config(), section)).model_fields
    return TypeAdapter(fields[name].rebuild_annotation())


def accepts(key: str, value: float) -> bool:
    try:
        adapter(key).validate_python(value)
    except ValidationError:
        return False
    return True


def ends(key: str) -> list[float]:
    """The smallest positive value and the largest one, by bisection over the powers of two."""
    assert key in FLOATS
    powers = [2.0**power for power in range(-1074, 1024)]
    allowed = [value for value in powers if accepts(key, value)]
    assert allowed, key
    return [allowed[0], allowed[-1]]


@pytest.mark.parametrize("key", FLOATS)
def test_the_smallest_and_the_largest_value_are_normal_numbers_of_float32(key):
    for value in ends(key):
        for dtype in (torch.float32, torch.bfloat16):
            found = torch.tensor(value, dtype=dtype).item()
            assert math.isfinite(found) and found >= TINY, (value, dtype)
    for value in (5e-324, 1e-300, TINY / 2, 1e39, 1e308, math.nan, -1e-3):
        assert not accepts(key, value), value


@pytest.mark.parametrize("key", ["optimizer.beta1", "optimizer.beta2", "optimizer.momentum"])
def test_a_running_mean_changes_with_a_new_value(key):
    nearest = [1 - 2.0**-power for power in range(1, 53)]
    most = [value for value in nearest if accepts(key, value)][-1]
    assert 1 - torch.tensor(most, dtype=torch.float32).item() > 0 and not accepts(key, nearest[-1])


def test_products_of_keys_are_normal_numbers():
    alpha, rank = ends("lora.alpha"), (1, 2**16)
    scales = [value / number for value, number in itertools.product(alpha, rank)]
    gradients = (1e-4, 1.0, 1e3)  # of an adapter, without the scale
    for scale, gradient in itertools.product(scales, gradients):
        assert TINY <= (scale * gradient) ** 2 <= torch.finfo(torch.float32).max
    for lr, decay in itertools.product(ends("optimizer.lr"), ends("optimizer.weight_decay")):
        assert TINY <= lr * decay <= torch.finfo(torch.float32).max
    for lr, factor in itertools.product(ends("optimizer.lr"), ends("lr_scheduler.min_lr_factor")):
        for warmup_steps, total_steps in ((10**10, 10**10), (0, 100)):
            tables = {"warmup_steps": warmup_steps, "total_steps": total_steps, "min_lr_factor": factor}
            schedule = build_schedule(Config.model_validate({"optimizer": {"lr": lr}, "lr_scheduler": tables}))
            assert all(TINY <= schedule.at(step) <= torch.finfo(torch.float32).max for step in (1, total_steps))
