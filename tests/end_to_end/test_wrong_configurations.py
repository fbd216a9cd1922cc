"""A wrong configuration ends within seconds with one message that names the key, before anything is started or written."""

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, models

from tests.end_to_end.forked import Done, titanlite
from tests.end_to_end.launcher import ROOT, run

RIGHT = """
[job]
dump_folder = "out"
[training]
dataset = "data.txt"
steps = 3
seq_len = 32
local_batch_size = 2
[lr_scheduler]
warmup_steps = 0
"""

# In every working folder; a file is wrong in the one way that its name says.
FILES = {
    "run.toml": RIGHT,
    "data.txt": "Some words to read, again and again. " * 200,
    "a_file": "not a folder",
    "unknown_key.toml": RIGHT + "[optimizer]\nlearning_rat = 1e-3\n",
    "fault_in_base.toml": 'base = "unknown_key.toml"\n',
    "three_faults.toml": RIGHT + '[optimizer]\nlr = -1\nname = "SGD"\n[metrics]\nlog_frequency = 1\n',
    "torchtitan.toml": RIGHT + "[experimental]\nmode = 'full'\n[checkpoint]\nenable = true\nlast_save_model_only = true\n",
    "own/half_a_model.py": "class Config: pass\nFLAVORS = {'debug': Config()}\n",
}


class Case(NamedTuple):
    """What is typed after ./run_train.sh, what the message must hold, and the environment."""

    words: str
    expected: tuple[str, ...]
    variables: dict[str, str]


def case(words: str, *expected: str, **variables: str) -> Case:
    return Case(words, expected, variables)


# tests/unit/test_config_file.py and test_checks.py have more; here, one of each part that refuses
CASES = {
    # the file
    "no arguments": case("", "give a configuration first"),
    "missing file": case("rum.toml", "rum.toml: no such configuration file", "did you mean run.toml?"),
    "fault in the base": case(
        "fault_in_base.toml", "fault_in_base.toml: 1 fault", "optimizer.learning_rat = 0.001 (unknown_key.toml)"
    ),
    "three faults at once": case(
        "three_faults.toml", "3 faults", "optimizer.lr = -1", 'optimizer.name = "SGD"', "metrics.log_frequency"
    ),
    "keys of torchtitan": case(
        "torchtitan.toml", "2 faults", "[experimental]: no such section", "checkpoint.last_save_model_only", "convert-config"
    ),
    "ranks as an option": case("run.toml --ranks 4", "ranks = ", "NGPU x NNODES"),
    # the machine
    "NGPU is 0": case("run.toml", "NGPU=0", "from 1 to 1024", NGPU="0"),
    "NGPU is a word": case("run.toml", "NGPU=abc", "whole number", NGPU="abc"),
    "two nodes without a meeting point": case("run.toml", "NNODES=2 needs RDZV_ENDPOINT", NNODES="2"),
    "node 2 of 2": case("run.toml", "NODE_RANK=2", "NNODES=2", NNODES="2", NODE_RANK="2", RDZV_ENDPOINT="localhost:1"),
    "degrees that need more ranks": case(
        "run.toml --parallelism.data_parallel_shard_degree 4",
        "data_parallel_shard_degree = 4",
        "needs 4 processes, and there are 2",
        NGPU="2",
    ),
    "half a model": case(
        "run.toml --model.name own.half_a_model", "model.name = 'own.half_a_model'", "lacks Model, sharding, initial"
    ),
    "tokenizer larger than the model": case(
        "run.toml --model.hf_assets_path large_tokenizer", "model.hf_assets_path", "ids up to 5000", "vocabulary of 4096"
    ),
}

# what the script itself refuses, and one of all others
BY_THE_SHELL = ("ranks as an option", "NGPU is 0", "NGPU is a word", "two nodes without a meeting point", "node 2 of 2")
SOME = ("degrees that need more ranks",)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with size and time of change."""
    found = {str(path): path.stat() for path in folder.rglob("*")}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in found.items()}


def prepare(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    words = {word: i for i, word in enumerate(["</s>", *map(str, range(5000))])}
    (folder / "large_tokenizer").mkdir()
    Tokenizer(models.WordLevel(words, unk_token="</s>")).save(str(folder / "large_tokenizer/tokenizer.json"))


def check(wrong: Case, folder: Path) -> Done:
    """The check that run_train.sh makes before it starts anything."""
    ranks = wrong.variables.get("NGPU", "1")
    words = [*shlex.split(wrong.words), "--ranks", ranks, "--local-ranks", ranks]
    return titanlite("check", *words, folder=folder, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1")


def assert_refused(wrong: Case, code: int, out: str, err: str) -> None:
    """One message, and nothing of a run."""
    message = " ".join(err.replace("│", " ").split())  # without frames and line breaks
    assert code == 2, err
    assert [part for part in wrong.expected if part not in message] == [], err
    assert "Traceback" not in err
    assert "[rank" not in err and "the run is over" not in err  # no rank was ever started
    assert err.count(wrong.expected[0]) == 1
    assert len(err.splitlines()) <= 5, err
    assert out == ""


@pytest.mark.parametrize("name", [name for name in CASES if name not in BY_THE_SHELL])
def test_it_is_refused_with_one_message_and_without_a_trace(name, tmp_path):
    prepare(tmp_path)
    before = contents(tmp_path)
    assert_refused(CASES[name], *check(CASES[name], tmp_path))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [*BY_THE_SHELL, *SOME])
def test_run_train_ends_with_that_message_and_starts_nothing(name, tmp_path):
    prepare(tmp_path)
    before = contents(tmp_path)
    variables = {"PYTHONDONTWRITEBYTECODE": "1", **CASES[name].variables}  # a cache beside own/half_a_model.py is no trace
    ended = run(*shlex.split(CASES[name].words), folder=tmp_path, **variables)
    assert_refused(CASES[name], ended.code, ended.out, ended.err)
    assert ended.left == []
    assert contents(tmp_path) == before
