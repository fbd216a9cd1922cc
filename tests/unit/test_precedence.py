"""Base < file < command line, for every key and under each of its names."""

import json

import pytest

from tests.hostile.keys import FIELDS, other, toml
from titanlite.config.read import KEYS, read_config, toml_value
from titanlite.config.renamed_keys import RENAMED, REWRITTEN, SAME, SWITCHES
from titanlite.config.schema import Config
from titanlite.errors import UserError

LAYERS = [("base", "file"), ("base", "option"), ("file", "option")]
# key -> its names, each with how a value is written there
NAMES = {key: [(key, str)] for key in KEYS}
for _theirs, _ours in RENAMED.items():
    NAMES[_ours] = [*NAMES[_ours], (_theirs, str)]
NAMES["float8.enable"] = [
    *NAMES["float8.enable"],
    ("model.converters", {"true": '["quantize.linear.float8"]', "false": "[]"}.__getitem__),
]


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
def test_the_later_layer_counts_under_each_name_of_a_key(tmp_path, lower, higher):
    for key, names in NAMES.items():
        if key == "model.overrides" and higher == "file":  # adds to the table of its base
            continue
        section, name = key.split(".")
        values = [other(key)] if default(key) == '"none"' else [other(key), default(key)]  # TOML has no null
        for low, write_low in names:
            for high, write_high in names:
                for over in values if len(names) > 1 else values[:1]:
                    under = next((value for value in values if value != over), over)
                    config = read(tmp_path, **{lower: {low: write_low(under)}, higher: {high: write_high(over)}})
                    expected = read(tmp_path, file={key: over})
                    assert getattr(getattr(config, section), name) == getattr(getattr(expected, section), name), (low, high)
                    assert config.layers[key].number == {"base": -1, "file": 0, "option": 1}[higher], (low, high)


def test_two_names_of_a_key_in_one_layer_are_refused(tmp_path):
    pairs = [(key, names[1:]) for key, names in NAMES.items() if len(names) > 1]
    assert len(pairs) == len({ours for *_, ours, _ in REWRITTEN} | set(RENAMED.values()))
    for key, others in pairs:
        for theirs, write in others:
            for layer in ("base", "file", "option"):
                with pytest.raises(UserError, match=f"{theirs} and {key} are one option"):
                    read(tmp_path, **{layer: {key: other(key), theirs: write(other(key))}})


@pytest.mark.parametrize(("lower", "higher"), LAYERS)
def test_a_later_layer_takes_back_what_titanlite_does_not_have(tmp_path, lower, higher):
    for key, same in SAME.items():
        if "*" in key or key in SWITCHES:  # with another option off, any value is taken
            continue
        for value in same:
            wrong = {lower: {key: '"of words"'}}
            with pytest.raises(UserError, match=key.split(".")[-1]):
                read(tmp_path, **wrong)
            read(tmp_path, **wrong, **{higher: {key: json.dumps(value)}})


def test_a_table_and_a_key_in_it_are_two_names_in_one_layer(tmp_path):
    for words in (["{ n_layers = 3 }", "5"], ["{}", "5"]):
        options = {"model.overrides": words[0], "model.overrides.dim": words[1]}
        with pytest.raises(UserError, match=r"--model\.overrides and --model\.overrides\.dim: give one of them"):
            read(tmp_path, option=options)
