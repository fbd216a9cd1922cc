"""Base < file < command line, for every key."""

import json

import pytest

from tests.hostile.keys import FIELDS, other, toml
from titanlite.config.read import KEYS, read_config, toml_value
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError

LAYERS = [("base", "file"), ("base", "option"), ("file", "option")]


def read(folder, **layers: dict[str, str]) -> Config:
    """The configuration of these settings in a base, a file over it, and options."""
    (folder / "base.toml").write_text(toml(layers.get("base", {})))
    (folder / "run.toml").write_text(toml(layers.get("file", {}), "base.toml"))
    return read_config(folder / "run.toml", [f"--{key}={_word(value)}" for key, value in layers.get("option", {}).items()])


def _word(value: str) -> str:
    """A TOML value as a word of the command line."""
    return str(json.loads(value)) if value.startswith('"') else value


def default(key: str) -> str:
    value = FIELDS[key].get_default()
    return '"none"' if value is None else toml_value(value)


@pytest.mark.parametrize(("lower", "higher"), LAYERS)
def test_the_later_layer_counts(tmp_path, lower, higher):
    for key in KEYS:
        if key == "model.overrides" and higher == "file":  # adds to the table of its base
            continue
        section, name = key.split(".")
        values = [other(key)] if default(key) == '"none"' else [other(key), default(key)]  # TOML has no null
        over, under = values[0], values[-1]
        config = read(tmp_path, **{lower: {key: under}, higher: {key: over}})
        expected = read(tmp_path, file={key: over})
        assert getattr(getattr(config, section), name) == getattr(getattr(expected, section), name), key
        assert config.layers[key].number == {"base": -1, "file": 0, "option": 1}[higher], key


def test_a_table_and_a_key_in_it_are_two_names_in_one_layer(tmp_path):
    for words in (["{ n_layers = 3 }", "5"], ["{}", "5"]):
        options = {"model.overrides": words[0], "model.overrides.dim": words[1]}
        with pytest.raises(UserError, match=r"--model\.overrides and --model\.overrides\.dim: give one of them"):
            read(tmp_path, option=options)
