"""titanlite replay: repeats a step of a run, on the same ranks bit for bit, without changing the run."""

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.forked import Done, prepare, titanlite, train
from titanlite.launch.run_folder import RunLock


def replay(folder: Path, *words: str) -> Done:
    return titanlite("replay", *words, "--model", "tests.tiny", folder=folder)


def trained(folder: Path, ranks: int, *options: str) -> Path:
    batch, saved = {"steps": 7, "global_batch_size": 4, "local_batch_size": 2}, {"enable": True, "interval": 3}
    prepare(folder, "tests.tiny", training=batch, checkpoint=saved)
    ended = train("run.toml", *options, folder=folder, ranks=ranks)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("split"), 2, "--parallelism.tensor_parallel_degree", "2")


def report(folder: Path, step: int) -> dict[str, float]:
    lines = (folder / "out/metrics.jsonl").read_text().splitlines()
    return next(found for found in map(json.loads, lines) if found["step"] == step)


def printed(text: str) -> tuple[float, float]:
    """(loss, gradient norm)."""
    found = dict(re.findall(r"^(loss|gradient norm) +(\S+)$", text, re.MULTILINE))
    return float(found["loss"]), float(found["gradient norm"])


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("step", "start"), [(2, "the initial weights"), (5, "the checkpoint of step 3")])
def test_a_replayed_step_equals_the_run_bit_for_bit_while_the_run_continues_undisturbed(alone, step, start):
    before = contents(alone)
    held = RunLock(alone / "out")  # as in a running run
    ended = replay(alone, "out", "--step", str(step))
    held.close()
    assert ended.code == 0, ended.err
    first = ended.out.splitlines()[0]
    assert first == f"step {step} of out: samples {(step - 1) * 4} to {step * 4 - 1}, from {start}, on one process"
    assert printed(ended.out) == (report(alone, step)["loss"], report(alone, step)["grad_norm"])
    assert "metrics.jsonl  loss equal, gradient norm equal" in ended.out
    assert [line.split()[0] for line in ended.out.splitlines()[5:]] == ["embed", "layers.0", "layers.1", "head"]
    assert "Traceback" not in ended.err and "Warning" not in ended.err
    assert {path.name for path in contents(alone).keys() - before.keys()} <= {".lock"}
    assert all(contents(alone)[path] == what for path, what in before.items() if path.name != ".lock")


def test_a_replay_is_exact_on_the_runs_mesh_and_within_rounding_on_one_process(split):
    before = contents(split)
    ended = replay(split, "out", "--step", "6", "--ranks", "2")
    assert ended.code == 0, ended.err
    assert "from the checkpoint of step 3, on tp 2" in ended.out
    assert printed(ended.out) == (report(split, 6)["loss"], report(split, 6)["grad_norm"])
    alone = replay(split, "out", "--step", "6")
    assert alone.code == 0, alone.err
    assert "on one process" in alone.out
    assert printed(alone.out) == pytest.approx(printed(ended.out), rel=1e-4)
    assert contents(split) == before


def test_a_step_of_two_ranks_is_replayed_without_a_checkpoint_and_with_a_derived_batch(tmp_path):
    trained(tmp_path, 2, "--checkpoint.enable", "false", "--training.global_batch_size", "-1", "--training.steps", "3")
    ended = replay(tmp_path, "out", "--step", "3", "--ranks", "2")
    assert ended.code == 0, ended.err
    assert "from the initial weights, on dp_shard 2" in ended.out
    assert printed(ended.out) == (report(tmp_path, 3)["loss"], report(tmp_path, 3)["grad_norm"])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["out", "--step", "8"], "--step 8: the run in out reached step 7 at most"),
        (["out", "--step", "2", "--attempt", "2"], "--attempt 2: the run reached step 2 1 times"),
        (["out", "--step", "2", "--ranks", "6"], "--ranks 6: 3 data-parallel ranks cannot share a global batch of 4 equally"),
        (["out", "--step", "2", "--ranks", "3"], "does not divide the number of processes, 3"),
        (["out/checkpoint", "--step", "2"], "out/checkpoint: there is no config.toml"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_refused_with_the_reason(split, words, fault):
    ended = replay(split, *words)
    assert ended.code == 2
    assert fault in ended.err
    assert "Traceback" not in ended.err
