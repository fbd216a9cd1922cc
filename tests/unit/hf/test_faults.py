"""Invalid commands and configurations are refused by name, before any process starts."""

import importlib
import shutil
from pathlib import Path

import pytest

from tests.hf_folders import NORM, remove
from titanlite.__main__ import COMMANDS
from titanlite.config.read import read_config
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check


def case(words: str, *message: str) -> tuple[str, tuple[str, ...]]:
    return words, message


COMMAND_FAULTS = {
    "damaged": case("import-hf --source damaged --output new", "model.norm.weight (model.head.norm.weight): is missing"),
    "export is there": case("export-hf --checkpoint weights --output source --model tests.tiny", "source: already exists"),
}
HF = "checkpoint.enable=true checkpoint.initial_load_path=source checkpoint.initial_load_in_hf=true"
RUN_FAULTS = {
    "a folder is no checkpoint": case(HF[: HF.rindex(" ")], "not a checkpoint", "set checkpoint.initial_load_in_hf = true"),
    "other dimensions": case(f"{HF} model.flavor=scaled", "other dimensions than tests.tiny scaled: rope_scaling = [8.0, 1.0"),
    "other shapes": case(f"{HF} model.flavor=uneven", "vocab_size = 515, there 512"),
    "a branch of a folder": case(f"{HF} checkpoint.initial_load_model_only=false", "in_hf = true: a folder in Hugging"),
    "no place for a family": case(
        "checkpoint.enable=true checkpoint.last_save_in_hf=true model.name=tests.tiny_dropout",
        "last_save_in_hf = true: tests.tiny_dropout: lacks HF, HF_TYPES, from_hf, to_hf",
    ),
}  # fmt: skip


@pytest.fixture
def place(sources, imported, tmp_path, monkeypatch) -> Path:
    """The working folder, with source, damaged, and weights, which import-hf made from source."""
    shutil.copytree(sources("tests.tiny", "plain"), tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "damaged")
    remove(NORM)(tmp_path / "damaged")
    shutil.copytree(imported("tests.tiny", "plain"), tmp_path / "weights")
    (tmp_path / "data.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", COMMAND_FAULTS)
def test_a_wrong_command_is_refused_in_one_sentence_and_writes_nothing(place, monkeypatch, capsys, fault):
    before = sorted(path.name for path in place.iterdir())
    words, message = COMMAND_FAULTS[fault]
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises((UserError, SystemExit)) as ended:
        importlib.import_module(COMMANDS[words.split()[0]][0]).main()
    said = f"{ended.value} {capsys.readouterr().err}"
    assert all(part in said for part in message), said
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_wrong_run_is_refused_before_any_process_starts(place, fault):
    words, message = RUN_FAULTS[fault]
    start = "model.name=tests.tiny model.flavor=plain model.hf_assets_path=source training.dataset=data.txt"
    options = dict(word.split("=") for word in [*start.split(), *words.split()])
    config = read_config(None, [f"--{key}={value}" for key, value in options.items()])
    with pytest.raises(UserError) as raised:
        check(config, "run.toml", 1)
    assert all(part in str(raised.value) for part in message), raised.value
    assert len(str(raised.value).splitlines()) <= 3, "more than what is wrong"
