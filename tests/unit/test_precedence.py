"""Every key: base < file < command line; and a command's changes of a run's configuration leave no key without effect."""

import json
from pathlib import Path

import pytest
import torch

from tests.hostile.keys import FIELDS, OTHERS, other, setting, toml
from titanlite.config.effects import Hardware, effective_when
from titanlite.config.read import KEYS, read_config, toml_value
from titanlite.config.schema import Config
from titanlite.config.tables import MAY_CHANGE
from titanlite.ground.errors import UserError
from titanlite.loop import checks, resume
from titanlite.optim import build as optimizers
from titanlite.optim import lr_schedule
from titanlite.tools import verify
from titanlite.tools.replay import check_setting, replay_config

LAYERS = [("base", "file"), ("base", "option"), ("file", "option")]


def read(folder, **layers: dict[str, str]) -> Config:
    """The configuration from settings in a base, a file and options."""
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
        if key == "model.overrides" and higher == "file":  # extends the table of its base
            continue
        section, name = key.split(".")
        values = [other(key)] if default(key) == '"none"' else [other(key), default(key)]  # TOML has no null
        over, under = values[0], values[-1]
        config = read(tmp_path, **{lower: {key: under}, higher: {key: over}})
        expected = read(tmp_path, file={key: over})
        assert getattr(getattr(config, section), name) == getattr(getattr(expected, section), name), key
        assert config.layers[key].number == {"base": -1, "file": 0, "option": 1}[higher], key


def test_a_table_of_a_later_layer_replaces_a_value_that_is_none(tmp_path):
    key, given = "model.overrides.rope_scaling", {"factor": 16}
    for layers in (
        {"base": {key: '"none"'}, "file": {f"{key}.factor": "16"}},
        {"file": {key: '"none"'}, "option": {f"{key}.factor": "16"}},
    ):
        assert read(tmp_path, **layers).model.overrides == {"rope_scaling": given}, layers
    with pytest.raises(UserError, match=r"training\.steps"):
        read(tmp_path, file={"training.steps": "5"}, option={"training.steps.x": "5"})


def test_a_table_and_a_key_in_it_are_two_names_in_one_layer(tmp_path):
    for words in (["{ n_layers = 3 }", "5"], ["{}", "5"]):
        options = {"model.overrides": words[0], "model.overrides.dim": words[1]}
        with pytest.raises(UserError, match=r"--model\.overrides and --model\.overrides\.dim: give one of them"):
            read(tmp_path, option=options)


# --------------------------------------------------------------------------- a command that takes a run's configuration

CONDITIONAL = [key for key in FIELDS if key not in OTHERS and effective_when(FIELDS[key]).conditions]


def settings_of(key: str) -> dict[str, str]:
    """A run in which the key has another value and an effect, and which saves checkpoints and validates."""
    return {"checkpoint.enable": "true", "validation.enable": "true"} | setting(key, "none")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_replay_takes_the_runs_own_configuration(tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "CHECKS", ())  # except those of keys without effect
    for key in CONDITIONAL:
        Path("run.toml").write_text(toml({"training.global_batch_size": "16", **settings_of(key)}))
        config = read_config("run.toml", [])
        try:
            replayed = replay_config(config, 16, ranks)
        except UserError as error:
            assert ranks and "the number of processes" in str(error)  # invalid on this mesh
        else:
            check_setting(replayed, Path(), ranks or 1)
            own, others = (resume._flat(each.model_dump()) for each in (config.settled(Hardware()), replayed))
            changed = {name for name, rule in resume._ON_RESUME.items() if rule != MAY_CHANGE and own[name] != others[name]}
            assert changed <= {"training.global_batch_size"}, "a resume would be refused"


def test_a_replay_of_a_run_that_ended_during_its_warm_up_has_the_schedule_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS", [each for each in checks.CHECKS if each.name == "schedule"])
    config = Config.model_validate({"training": {"steps": 12}, "lr_scheduler": {"warmup_steps": 15}})
    with pytest.raises(UserError, match=r"lr_scheduler\.warmup_steps = 15"):
        check_setting(config, tmp_path, 1)
    start = {"time": "2026-11-28T12:00:00", "command": ["titanlite"], "compared": {"lr_scheduler.total_steps": 20}}
    (tmp_path / "provenance.json").write_text(json.dumps([start]))
    check_setting(config, tmp_path, 1)


def test_verify_takes_it_too_and_refuses_what_the_user_gave_in_vain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in CONDITIONAL:
        Path("run.toml").write_text(toml(settings_of(key)))
        _, _, config = verify._parse(["run.toml", "--mesh", "1", "--mesh", "dp_shard=2"])
        assert not [idle for idle in config.idle(verify.Hardware()) if idle.refused], key
    with pytest.raises(UserError, match=r"checkpoint\.interval"):
        verify._parse(["run.toml", "--checkpoint.enable", "false", "--checkpoint.interval", "5"])


SKIPPED = {"training.dtype": '"bfloat16"', "optimizer.implementation": '"for-loop"', "training.on_nonfinite": '"skip"'}


@pytest.mark.parametrize("keys", [{"checkpoint.enable": "true", "training.on_nonfinite": '"rollback"'}, SKIPPED])
def test_what_a_run_accepts_verify_accepts_in_float32_and_without_checkpoints(tmp_path, monkeypatch, keys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(toml(keys))
    _, _, config = verify._parse(["run.toml", "--mesh", "1", "--mesh", "dp_shard=2"])
    for of_a_run in (read_config("run.toml", []), config):
        assert [*resume.faults(of_a_run), *optimizers.faults(of_a_run)] == []


@pytest.mark.parametrize(
    ("given", "options", "steps", "schedule"),
    [("3", [], 3, 3), ("3", ["--steps", "9"], 9, 9), ("40", [], 5, 40), ("40", ["--steps", "9"], 9, 40)],
)
def test_verify_takes_a_run_with_fewer_steps_than_its_own(tmp_path, monkeypatch, given, options, steps, schedule):
    """It refused training.steps = 5, which nobody had set, since the schedule of the run ended before."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(toml({"training.steps": given, "lr_scheduler.warmup_steps": "1"}))
    _, _, config = verify._parse(["run.toml", *options])
    assert (config.training.steps, config.schedule_steps, [*lr_schedule.faults(config)]) == (steps, schedule, [])


@pytest.mark.parametrize("mesh", ["dp_shard=2,dp_shard=4", "dp_shard", "shard=2", "tp=0"])
def test_verify_refuses_a_mesh_that_it_would_read_otherwise_than_meant(tmp_path, monkeypatch, mesh):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(toml({}))
    with pytest.raises(UserError, match=f'--mesh "{mesh}"'):
        verify._parse(["run.toml", "--mesh", "1", f"--mesh={mesh}"])


def test_verify_leaves_out_float8_which_float32_excludes():
    _, _, config = verify._parse(["train_configs/llama_8b_float8.toml", "--mesh", "1", "--mesh", "dp_shard=2"])
    assert not config.float8.enable and config.training.mixed_precision_param == "float32"


def test_verify_runs_all_meshes_on_cpus_where_one_has_more_ranks_than_the_machine_has_gpus(tmp_path, monkeypatch, capsys):
    def started(*_, use_gpus: bool, **__) -> None:
        raise UserError(f"on GPUs: {use_gpus}")

    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(toml({"training.seq_len": "64"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(verify, "on_ranks", started)
    monkeypatch.setattr("sys.argv", ["verify", "run.toml", "--mesh", "1", "--mesh", "dp_shard=2"])
    with pytest.raises(UserError, match="mesh 1: on GPUs: False"):  # where its single rank would have found one
        verify.main()
    assert "this machine has 1 GPUs, and a mesh 2 ranks" in capsys.readouterr().out
