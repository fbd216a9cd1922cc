"""What a command changes of a run's configuration leaves no key of it without effect: every key that depends on another."""

from pathlib import Path

import pytest

from tests.hostile.keys import FIELDS, OTHERS, setting, toml
from titanlite.config.effects import effective_when
from titanlite.config.read import read_config
from titanlite.ground.errors import UserError
from titanlite.loop import checks
from titanlite.tools import verify
from titanlite.tools.replay import check_setting, replay_config

CONDITIONAL = [key for key in FIELDS if key not in OTHERS and effective_when(FIELDS[key]).conditions]


def settings_of(key: str) -> dict[str, str]:
    """A run whose key has a value of its own and an effect, and which saves checkpoints and validates."""
    return {"checkpoint.enable": "true", "validation.enable": "true"} | setting(key, "none")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_replay_takes_the_runs_own_configuration(tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "CHECKS", ())  # but those of keys without effect
    for key in CONDITIONAL:
        Path("run.toml").write_text(toml({"training.global_batch_size": "16", **settings_of(key)}))
        config = read_config("run.toml", [])
        try:
            replayed = replay_config(config, 16, ranks)
        except UserError as error:
            assert ranks and "the number of processes" in str(error)  # which this mesh cannot have
        else:
            check_setting(replayed, Path(), ranks or 1)


def test_verify_takes_it_too_and_refuses_what_the_user_gave_in_vain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in CONDITIONAL:
        Path("run.toml").write_text(toml(settings_of(key)))
        _, _, config = verify._parse(["run.toml", "--mesh", "1", "--mesh", "dp_shard=2"])
        assert not [idle for idle in config.idle(verify.Hardware()) if idle.refused], key
    with pytest.raises(UserError, match=r"checkpoint\.interval"):
        verify._parse(["run.toml", "--checkpoint.enable", "false", "--checkpoint.interval", "5"])
