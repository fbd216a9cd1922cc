"""Keys that have no effect: refused by who could see it, else reported, and never used."""

from typing import Annotated

import pytest

from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.read import SECTIONS
from titanlite.config.schema import Config, Section

HERE = Hardware(cuda=False, ranks=1)


def test_a_key_that_names_no_condition_is_no_key():
    with pytest.raises(TypeError, match="each key has one EffectiveWhen"):

        class Forgotten(Section):
            key: Annotated[int, "no condition"] = 1


def test_every_condition_can_be_evaluated_and_names_keys_that_exist():
    for schema in SECTIONS.values():
        for field in schema.model_fields.values():
            for condition in effects.effective_when(field).conditions:
                effects.EffectiveWhen(condition).failing(Config(), HERE)
                assert all(key.split(".")[1] in SECTIONS[key.split(".")[0]].model_fields for key in effects.keys_of(condition))


@pytest.mark.parametrize("hardware", [HERE, Hardware(True, 8), Hardware()])
def test_defaults_are_never_refused_or_noted(hardware):
    assert list(effects.faults(Config().idle(hardware))) == [] and effects.note(Config().idle(hardware)) == ""
