"""Keys that have no effect unless other keys have certain values."""

import pytest
from pydantic import BaseModel

from titanlite.config import effects
from titanlite.config.read import SECTIONS
from titanlite.config.schema import Config

RULES = [
    (section, name, rule)
    for section, schema in SECTIONS.items()
    for name in schema.model_fields
    if (rule := effects.effective_when(schema, name))
]


def test_every_condition_can_be_evaluated():
    for _, _, rule in RULES:
        rule.failing(Config(), cuda=True)


@pytest.mark.parametrize("cuda", [True, False])
def test_defaults_are_never_idle(cuda):
    assert list(effects.faults(Config(), cuda)) == []


def test_a_sections_rule_is_for_all_its_keys_but_enable():
    assert [name for section, name, _ in RULES if section == "lora"] == ["rank", "alpha", "modules"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"checkpoint": {"load_step": 3}}, "checkpoint.load_step = 3: has no effect unless checkpoint.enable = true"),
        ({"checkpoint": {"load_step": 3, "enable": True}}, None),
        ({"parallelism": {"cpu_offload": True}}, f"parallelism.cpu_offload = true: has no effect unless {effects.CUDA}"),
        ({"optimizer": {"nesterov": False}}, 'optimizer.nesterov = false: has no effect unless optimizer.name = "Muon"'),
        ({"optimizer": {"nesterov": False, "name": "Muon"}}, None),
    ],
)
def test_an_idle_key_is_named_with_the_condition_that_does_not_hold(table, expected):
    config: BaseModel = Config.model_validate(table)
    assert list(effects.faults(config, cuda=False)) == ([expected] if expected else [])
