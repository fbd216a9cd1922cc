"""titanlite replay: repeats a step of a run, on the same ranks bit for bit, without changing the run.

tests/distributed/test_replay.py has other meshes, rollbacks and starts.
"""

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.forked import Done, prepare, titanlite, train
from titanlite.launch.run_folder import RunLock


def replay(folder: Path, *words: str) -> Done:
    return titanlite("replay", *words, "--model", "tests.tiny", folder=folder)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """The folder of a run on two ranks."""
    folder = tmp_path_factory.mktemp("split")
    batch, saved = {"steps": 7, "global_batch_size": 4, "local_batch_size": 2}, {"enable": True, "interval": 3}
    prepare(folder, "tests.tiny", training=batch, checkpoint=saved, parallelism={"tensor_parallel_degree": 2})
    ended = train("run.toml", folder=folder, ranks=2)
    assert ended.code == 0, ended.err
    return folder


def printed(text: str) -> tuple[float, float]:
    """(loss, gradient norm)."""
    found = dict(re.findall(r"^(loss|gradient norm) +(\S+)$", text, re.MULTILINE))
    return float(found["loss"]), float(found["gradient norm"])


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_replay_is_exact_on_the_runs_mesh_and_within_rounding_on_one_process_and_does_not_disturb_the_run(split):
    before = contents(split)
    reports = map(json.loads, (split / "out/metrics.jsonl").read_text().splitlines())
    expected = next((report["loss"], report["grad_norm"]) for report in reports if report["step"] == 6)
    held = RunLock(split / "out")  # as in a running run
    ended = replay(split, "out", "--step", "6", "--ranks", "2")
    held.close()
    assert ended.code == 0, ended.err
    first, *lines = ended.out.splitlines()
    assert first == "step 6 of out: samples 20 to 23, from the checkpoint of step 3, on tp 2"
    assert printed(ended.out) == expected
    assert "metrics.jsonl  loss equal, gradient norm equal" in ended.out
    assert [line.split()[0] for line in lines[4:]] == ["embed", "layers.0", "layers.1", "head"]
    assert "Traceback" not in ended.err and "Warning" not in ended.err
    alone = replay(split, "out", "--step", "6")
    assert alone.code == 0, alone.err
    assert "on one process" in alone.out
    assert printed(alone.out) == pytest.approx(expected, rel=1e-4)
    assert {path: what for path, what in contents(split).items() if path.name != ".lock"} == {
        path: what for path, what in before.items() if path.name != ".lock"
    }


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["out", "--step", "8"], "--step 8: the run in out reached step 7 at most"),
        (["out", "--step", "2", "--attempt", "2"], "--attempt 2: the run reached step 2 1 times"),
        (["out", "--step", "2", "--ranks", "3"], "does not divide the number of processes, 3"),
        (["out/checkpoint", "--step", "2"], "out/checkpoint: there is no config.toml"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_refused_with_the_reason(split, words, fault):
    ended = replay(split, *words)
    assert ended.code == 2
    assert fault in ended.err and "Traceback" not in ended.err
