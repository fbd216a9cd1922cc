"""A wrong configuration ends within seconds with one message that names the key, before any process starts or any file is
written.
"""

from pathlib import Path

import pytest

from tests.end_to_end.forked import prepare
from tests.end_to_end.launcher import run

# The arguments of ./run_train.sh, the environment, and what the message must contain. tests/unit and tests/hostile have more;
# here, what the script itself refuses, and what the check of a configuration refuses.
CASES: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "no arguments": ("", {}, ("give a configuration first",)),
    "three faults at once": (
        "run.toml --optimizer.lr=-1 --optimizer.name=SGD --training.steps=x",
        {},
        ("3 faults", "optimizer.lr = ", "optimizer.name = ", "training.steps = "),
    ),
    "half a model": (
        "run.toml --model.name own.half_a_model",
        {"PYTHONDONTWRITEBYTECODE": "1"},  # so that no cache appears next to the module
        ("model.name = 'own.half_a_model'", "lacks Model, sharding, initial"),
    ),
}


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with size and time of change."""
    found = {str(path): path.stat() for path in folder.rglob("*")}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_run_train_ends_with_one_message_and_starts_nothing(name, tmp_path):
    words, variables, expected = CASES[name]
    prepare(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/half_a_model.py").write_text("class Config: pass\nFLAVORS = {'debug': Config()}\n")
    before = contents(tmp_path)
    ended = run(*words.split(), folder=tmp_path, **variables)
    assert (ended.code, ended.out, ended.left) == (2, "", []), ended.err
    message = " ".join(ended.err.replace("│", " ").split())  # without frames and line breaks
    assert [part for part in expected if part not in message] == [], ended.err
    assert message.count(expected[0]) == 1 and len(ended.err.splitlines()) <= 5, ended.err
    assert "Traceback" not in ended.err
    assert "[rank" not in ended.err and "the run is over" not in ended.err  # no rank was ever started
    assert contents(tmp_path) == before
