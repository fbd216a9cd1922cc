"""TOML files, their bases and overriding options become one configuration, or one list of all faults."""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from tests.hostile.arguments import run_command
from tests.hostile.keys import FIELDS, as_option, other
from titanlite.config.effects import Hardware
from titanlite.config.read import INSTEAD, read_config, stored_config, to_toml, toml_value
from titanlite.config.schema import Config, Section
from titanlite.ground.errors import HelpRequested, UserError
from titanlite.ground.untrusted import parse_toml
from titanlite.tools.help import print_help

# Values that are hard to write; all other keys have one that the schema gives.
HARD: dict[str, Any] = {
    "job.dump_folder": "C:\\runs\\'one' \"two\"",
    "job.description": "tab\t line\nreturn\r \"\"\" ''' # = [x] \x00\x1f\x7f\x85\u2028 \u00fc\u4e2d\U0001f600",
    "model.overrides": {"dim": 96, "a key": [1, 2.5, "x"], "rope_scaling": {"factor": 1e20, "on": True}},
    "metrics.save_tb_folder": "",
    "training.dataset_path": "true",
    "training.sources": [
        {"path": 'a "b"', "name": "web", "weight": 0.1 + 0.2, "epochs": 1e-3},
        {"path": "c", "name": "", "weight": None, "epochs": None},
    ],
    "training.max_norm": math.inf,
    "training.seed": 2**63 - 1,
    "lora.modules": ["layers.*.wq", "[!x]*"],
    "optimizer.lr": 1e-20,
    "optimizer.eps": 1e9,
    "optimizer.decay_parameters": r"^layers\.\d+\.",
    "lr_scheduler.decay_ratio": 1 / 3,
}


def with_other_values() -> Config:
    """A configuration with no key at its default."""
    tables: dict[str, dict[str, Any]] = {}
    for key in FIELDS:
        section, name = key.split(".")
        value = HARD[key] if key in HARD else getattr(getattr(read_config(None, [option(key)]), section), name)
        tables.setdefault(section, {})[name] = value
    return Config.model_validate(tables)


def option(key: str) -> str:
    return f"--{key}={as_option(other(key))}"


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        read_config(path, list(options))
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- files and bases


def test_a_base_is_looked_up_beside_its_file_and_not_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "recipes", "[training]\nsteps = 5\n", "common.toml")
    write(tmp_path / "elsewhere", "[training]\nsteps = 6\n", "common.toml")
    write(tmp_path / "recipes", 'base = "common.toml"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_config("../recipes/run.toml", []).training.steps == 5


def test_a_circle_of_bases_is_refused_and_drawn(tmp_path):
    write(tmp_path, 'base = "b.toml"\n', "a.toml")
    write(tmp_path, 'base = "c.toml"\n', "b.toml")
    write(tmp_path, 'base = "b.toml"\n', "c.toml")
    message = refusal(tmp_path / "a.toml")
    assert " -> ".join(str(tmp_path / f"{name}.toml") for name in "abcb") in message
    assert message.startswith(f"{tmp_path / 'c.toml'}: base = 'b.toml' makes a cycle")


def test_a_missing_base_is_named_with_the_file_that_names_it(tmp_path):
    write(tmp_path, 'base = "llama.toml"\n', "middle.toml")
    path = write(tmp_path, 'base = "middle.toml"\n')
    message = refusal(path)
    assert message.startswith(f"{tmp_path / 'llama.toml'}: no such configuration file")
    assert f"named as base by {tmp_path / 'middle.toml'}" in message


@pytest.mark.parametrize("text", ["base = 3", "training = 3"])
def test_a_file_of_the_wrong_form_is_refused(tmp_path, text):
    assert text in refusal(write(tmp_path, text))


# ------------------------------------------------------------------------------------------------------------- faults


def test_all_faults_are_reported_together_each_with_its_origin(tmp_path):
    write(tmp_path, '[training]\nsteps = 0\nseq_len = "long"\n', "base.toml")
    path = write(tmp_path, 'base = "base.toml"\n[training]\nstep = 1\n[trainer]\nx = 1\n')
    lines = refusal(path, "--optimizer.beta1", "1", "--training.gc_frequency", "3").splitlines()
    assert lines[0] == f"{path}: 6 faults"
    assert lines[-1] == f"if this is a file of torchtitan: titanlite convert-config {path} --output NEW.toml"
    assert sorted(lines[1:-1]) == sorted(
        [
            '  training.gc_frequency = "3" (option): no such key; did you mean training.gc_freq?',
            '  trainer = {"x": 1} (run.toml): no such section; did you mean training?',
            "  optimizer.beta1 = 1.0 (option): must be less than 1",
            '  training.seq_len = "long" (base.toml): must be a valid integer',
            "  training.step = 1 (run.toml): no such key; did you mean training.steps?",
            "  training.steps = 0 (base.toml): must be greater than or equal to 1",
        ]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[optimizer]\nlearning_rate = 1\n", "no such key; there are: name, lr, beta1"),
        ("[training]\nlr = 1\n", "training.lr = 1 (run.toml): no such key; did you mean optimizer.lr?"),
        ("steps = 5\n", "steps = 5 (run.toml): is in no section; did you mean training.steps or validation.steps?"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(tmp_path, text, expected):
    _, line = refusal(write(tmp_path, text)).splitlines()  # one may be misspelled, without advice on torchtitan's files
    assert expected in line


def test_removed_keys_and_options_of_other_commands_are_refused_with_the_replacement(tmp_path):
    assert not INSTEAD.keys() & FIELDS.keys()
    for key, instead in INSTEAD.items():
        assert f"  {key} = 9 (run.toml): not a key of titanlite: {instead}" in refusal(write(tmp_path, f"{key} = 9\n"))
        assert f'  {key} = "9" (option): not a key of titanlite: {instead}' in refusal(write(tmp_path, ""), f"--{key}", "9")


def test_a_checkpoint_of_an_earlier_version_is_read_without_removed_keys_and_values():
    stored = Config().model_dump()
    assert "unit" not in stored["compile"] and "compile.unit" in INSTEAD
    stored["compile"] |= {"unit": "block", "enable": True}
    stored["model"]["attention"] = "flash3"
    stored["parallelism"] |= {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}
    stored["parallelism"]["fsdp_reshard_after_forward"] = 8
    kept = {"compile": {"enable": True}, "parallelism": {"pipeline_parallel_degree": 2}}
    assert stored_config(stored, Path("step-00000010")) == Config.model_validate(kept)
    with pytest.raises(UserError, match=r"compile\.never_a_key"):
        stored_config({"compile": {"never_a_key": 1}}, Path("step-00000010"))


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("checkpoint.load_step", "-1", -1),
        ("training.max_norm", "inf", math.inf),
        ("job.description", "", ""),
        ("lr_scheduler.decay_ratio", "none", None),
    ],
)
def test_an_option_becomes_a_value_of_the_keys_type(option, text, value):
    section, name = option.split(".")
    found = getattr(getattr(read_config(None, [f"--{option}", text]), section), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--parallelism.fsdp_reshard_after_forward", "2"], "'default', 'always' or 'never'"),
        (["--training.steps", "--training.seed", "1"], "--training.steps: has no value"),
        (["--training.dataset="], "training.dataset = "),  # without a character it ended in a traceback
        (["--validation.dataset="], "validation.dataset = "),
        (["stray"], "stray: belongs to no option"),
        (["--training.steps", "5", "6"], "6: belongs to no option"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, words, expected):
    _, line = refusal(write(tmp_path, ""), *words).splitlines()
    assert expected in line


def test_help_shows_every_key_with_meaning_and_value(tmp_path, capsys):
    with pytest.raises(HelpRequested) as request:
        read_config(write(tmp_path, "[training]\nsteps = 4321\n"), ["--help"])
    print_help(request.value.values)
    # compared without spaces, which depend on the terminal's width
    shown = "".join(capsys.readouterr().out.split())
    for key, field in FIELDS.items():
        assert f"--{key}" in shown
        assert "".join(field.description.split()) in shown, key
    for meaning in (table.annotation.__doc__ for table in Config.model_fields.values()):
        assert "".join(meaning.split()) in shown
    assert shown.count("(now:") == len(FIELDS) + 1  # one is in the explanation above
    assert "(now:4321)" in shown


@pytest.mark.parametrize(("command", "option"), [("estimate", "--device-memory-gib"), ("plan", "--nodes-of")])
def test_help_without_a_configuration_shows_the_options_of_the_command(command, option, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(command, "--help")
    assert ended.value.code == 0 and f"\n  {option}" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("make", [Config, with_other_values])
def test_the_written_configuration_reads_back_equal(tmp_path, make):
    config = make()
    again = read_config(write(tmp_path, to_toml(config)), [])
    assert again == config.settled(Hardware())
    assert to_toml(again) == to_toml(config.settled(Hardware()))


def test_values_of_python_are_read_back_as_options_and_in_tables(tmp_path):
    """A sweep over NumPy's numbers had been refused."""
    values: dict[str, Any] = {"optimizer.lr": np.float64(1e-4), "training.steps": np.arange(3)[2]}
    values["training.sources"] = [{"path": "a", "weight": np.float32(0.5), "epochs": None}]
    options = [f"--{key}={toml_value(value)}" for key, value in values.items()]
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())
    for config in (read_config(None, options), read_config(write(tmp_path, text), [])):
        assert (config.optimizer.lr, config.training.steps) == (1e-4, 2)
        assert config.training.sources[0].model_dump(exclude_unset=True) == {"path": "a", "weight": 0.5}


def test_dots_in_texts_and_comments_are_no_names_of_a_key(tmp_path):
    """A pattern with more than 100 dots made the configuration that a run had written unreadable."""
    pattern = "|".join(f"layers.{number}" for number in range(102))
    config = Config.model_validate({"optimizer": {"decay_parameters": pattern}})
    path = write(tmp_path, f"{to_toml(config)}# {pattern}\n")
    assert read_config(path, [f"--optimizer.decay_parameters={pattern}"]) == read_config(path, []) == config


@pytest.mark.parametrize(
    "text",
    [
        "KEY = 1",
        "[KEY]",
        """x = { y = ["=", '''a\\''''', { KEY = 1, z = '"' }] }""",
        """x = { y = ['#', '"', \"""a\\\\""\\\"""\""", { KEY = 1, z = "\\"'" }] }""",
        """x = \"""\\\\\"""  # "\nKEY = "#\"""",
    ],
)
def test_a_key_of_many_names_is_refused_whatever_texts_are_beside_it(text):
    """The parser takes time in the square of their number."""
    for name in ("a", '"="', "'#'"):
        assert parse_toml(text.replace("KEY", ".".join([name] * 50)))
        with pytest.raises(ValueError, match="key of more than 100 names"):
            parse_toml(text.replace("KEY", ".".join([name] * 102)))


def test_keys_without_effect_are_comments_so_that_the_written_file_is_valid(tmp_path):
    config = Config.model_validate({"lora": {"rank": 4}, "parallelism": {"cpu_offload": True, "fsdp_prefetch": 2}})
    text = to_toml(config)
    assert "# rank = 4  (no effect unless lora.enable = true)" in text.splitlines()
    again = read_config(write(tmp_path, text), [])
    assert not [key for key in again.idle(Hardware()) if key.refused]
    assert (again.parallelism.cpu_offload, again.parallelism.fsdp_prefetch) == (True, 2), "another machine may have a GPU"


def test_every_key_must_have_a_condition():
    with pytest.raises(TypeError, match="each key has one EffectiveWhen"):

        class Forgotten(Section):
            key: Annotated[int, "no condition"] = 1
