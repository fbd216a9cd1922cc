"""Keys that have no effect: refused by who could see it, else reported, and never used."""

from typing import Annotated

import pytest

from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.read import SECTIONS, read_config
from titanlite.config.schema import Config, Section

HERE = Hardware(cuda=False, ranks=1)


def found(folder, texts: list[str], *options: str) -> list[effects.Idle]:
    """The keys without effect of files, of which each has the one before as its base, and options."""
    for number, text in enumerate(texts):
        base = f'base = "{number - 1}.toml"\n' if number else ""
        (folder / f"{number}.toml").write_text(base + text)
    return [key for key in read_config(folder / f"{len(texts) - 1}.toml", list(options)).idle(HERE) if key.layer.number > -9]


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


ON, OFF, FREQ = "[validation]\nenable = true\n", "[validation]\nenable = false\n", "[validation]\nfreq = 7\n"


@pytest.mark.parametrize(
    ("texts", "options", "refused"),
    [
        ([FREQ], [], True),  # nobody has switched validation on
        ([OFF + "freq = 7\n"], [], True),  # one layer switches it off and sets its key
        ([ON + "freq = 7\n"], ["--validation.enable", "false"], False),  # a later one switches it off
        ([ON + "freq = 7\n", OFF], [], False),
        ([ON, OFF + "freq = 7\n"], [], True),
        ([ON, OFF, FREQ], [], True),  # set after it was switched off
        ([ON], ["--validation.enable=false", "--validation.freq=7"], True),
        ([OFF], ["--validation.freq=7"], True),
        ([FREQ], ["--validation.enable=true"], None),  # has an effect
        ([OFF + "freq = 100\n"], [], False),  # its default changes nothing
    ],
)
def test_a_key_is_refused_if_who_set_it_could_see_that_it_has_no_effect(tmp_path, texts, options, refused):
    keys = [key for key in found(tmp_path, texts, *options) if key.name == "freq"]
    assert [key.refused for key in keys] == ([] if refused is None else [refused])
    if refused is False:
        assert "validation.freq = " in effects.note(keys) and effects.note(keys).endswith("unless validation.enable = true")
        assert len(effects.note(keys).splitlines()) == 1


@pytest.mark.parametrize("key", ["parallelism.cpu_offload", "parallelism.fsdp_prefetch", "comm.train_timeout_seconds"])
def test_what_depends_on_machine_or_ranks_is_reported_from_a_file_and_refused_as_an_option(tmp_path, key):
    section, name = key.split(".")
    value = "true" if name == "cpu_offload" else "7"
    (from_file,) = found(tmp_path, [f"[{section}]\n{name} = {value}\n"])
    (as_option,) = found(tmp_path, [""], f"--{key}", value)
    assert (from_file.refused, as_option.refused) == (False, True)


def test_a_settled_configuration_holds_no_value_without_effect():
    given = Config.model_validate({"lora": {"rank": 4}, "parallelism": {"cpu_offload": True}, "optimizer": {"lr": 0.5}})
    settled = given.settled(HERE)
    assert (settled.lora.rank, settled.parallelism.cpu_offload, settled.optimizer.lr) == (16, False, 0.5)
    assert given.settled(Hardware(cuda=True)).parallelism.cpu_offload
    assert not any(key.value != key.default for key in settled.idle(HERE))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"checkpoint": {"load_step": 3}}, "checkpoint.load_step = 3: has no effect unless checkpoint.enable = true"),
        ({"checkpoint": {"load_step": 3, "enable": True}}, None),
        ({"optimizer": {"nesterov": False}}, 'optimizer.nesterov = false: has no effect unless optimizer.name = "Muon"'),
        ({"optimizer": {"nesterov": False, "name": "Muon"}}, None),
        (
            {"lr_scheduler": {"decay_ratio": 0.0, "decay_type": "sqrt"}},
            'lr_scheduler.decay_type = "sqrt": has no effect unless the learning rate decays',
        ),
    ],
)
def test_an_idle_key_is_named_with_the_condition_that_does_not_hold(table, expected):
    config = Config.model_validate(table)
    assert [*effects.faults(config.idle(HERE))] == ([expected] if expected else [])
