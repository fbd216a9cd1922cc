"""Pairs of keys of optimizer and precision: each wrong one is refused by name, and passes with the remedy that it names."""

from typing import Any

import pytest
import torch

from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.schema import Config
from titanlite.optim import build
from titanlite.transforms import compile

MUON, BFLOAT16 = {"optimizer.name": "Muon"}, {"training.dtype": "bfloat16"}


def faults(keys: dict[str, Any]) -> list[str]:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    config = Config.model_validate(sections)
    return [*effects.faults(config.idle(Hardware(True, 1))), *build.faults(config)]


CASES = [
    ({"optimizer.rounding": "compensated"}, 'optimizer.rounding = "compensated": has no effect', BFLOAT16),
    (
        BFLOAT16 | {"training.mixed_precision_param": "float32"},
        'training.mixed_precision_param = "float32" with training.dtype',
        {"training.mixed_precision_param": "bfloat16"},
    ),
    (
        BFLOAT16 | {"training.mixed_precision_param": "float16"},
        'training.mixed_precision_param = "float16" with training.dtype',
        {"training.dtype": "float32"},
    ),
    (BFLOAT16 | {"lora.enable": True}, 'training.dtype = "bfloat16" with lora.enable', {"training.dtype": "float32"}),
    (
        BFLOAT16 | {"optimizer.implementation": "foreach"},
        'optimizer.implementation = "foreach" with training.dtype',
        {"optimizer.implementation": "for-loop"},
    ),
    ({"optimizer.momentum": 0.9}, "optimizer.momentum = 0.9: has no effect", MUON),
    ({"optimizer.nesterov": False}, "optimizer.nesterov = false: has no effect", MUON),
    ({"optimizer.ns_steps": 6, "optimizer.name": "Adam"}, "optimizer.ns_steps = 6: has no effect", MUON),
    (MUON | {"lora.enable": True}, 'optimizer.name = "Muon" with lora', {"optimizer.name": "AdamW"}),
    (MUON | {"parallelism.cpu_offload": True}, 'optimizer.name = "Muon" with parallelism', {"parallelism.cpu_offload": False}),
]


@pytest.mark.parametrize(("wrong", "expected", "change"), CASES)
def test_the_wrong_is_refused_by_name_and_the_right_passes(wrong, expected, change):
    (fault,) = faults(wrong)
    assert fault.startswith(expected)
    assert faults(wrong | change) == []


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Muon"])
def test_every_optimizer_goes_with_every_rounding(name, rounding):
    assert faults(BFLOAT16 | {"optimizer.name": name, "optimizer.rounding": rounding}) == []


def test_the_compiled_kernel_needs_a_compiler_where_parameters_are_on_a_cpu(monkeypatch):
    monkeypatch.setattr(compile, "has_compiler", lambda: False)
    (fault,) = faults(BFLOAT16)
    assert 'optimizer.implementation = "fused": with training.dtype = "bfloat16" its kernel is compiled' in fault
    assert faults(BFLOAT16 | {"optimizer.implementation": "for-loop"}) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert faults(BFLOAT16) == []
    assert len(faults(BFLOAT16 | {"parallelism.cpu_offload": True})) == 1
