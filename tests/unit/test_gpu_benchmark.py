"""benchmarks.gpu: a start goes on where the last one was cut off, a run that fails or hangs costs its own result only, and the
page names the goals that are missed."""

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import runs
from benchmarks.gpu.page import write_page
from benchmarks.gpu.plan import PARTS, Part, Run, named, options_of, training_runs, words_of
from benchmarks.gpu.runs import Kind, RunIdentity, read_training
from tests.waiting import until
from titanlite.config.read import read_config

ENDLESS = math.inf


@pytest.fixture
def setting(tmp_path, monkeypatch) -> RunIdentity:
    """Runs of kind "shell" are bash commands; each attempt adds a line to the file `attempts`."""
    attempts = tmp_path / "attempts"

    def words(run: Run, setting: RunIdentity) -> list[str]:
        return ["bash", "-c", f"echo {run.name} >> {attempts}; cd FOLDER; {run.options['do']}"]

    monkeypatch.setitem(runs.KINDS, "shell", Kind(words, lambda folder: json.loads((folder / "figures.json").read_text())))
    return RunIdentity(tmp_path / "work", 1, False)


def shell(name: str, do: str, seconds: int = 60) -> Run:
    return Run(name, "shell", seconds, options={"do": do})


GOOD = "echo '{\"figure\": 1}' > figures.json"


def attempts(setting: RunIdentity) -> list[str]:
    return (setting.work.parent / "attempts").read_text().split()


# ------------------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_training_run_of_the_plan_is_a_valid_configuration(rehearse):
    for name, run in training_runs(PARTS).items():
        path = program.ROOT / "train_configs" / f"{run.config}.toml"
        config = read_config(path, words_of(options_of(run, rehearse)))
        assert not config.checkpoint.enable and config.training.global_batch_size == -1, name
        assert config.model.flavor == "debug" or not rehearse, name


# ----------------------------------------------------------------------------------------------------- cut off, failed, late


def test_a_run_that_fails_or_hangs_and_a_part_out_of_time_stop_nothing_else(setting, tmp_path):
    parts = (
        Part("a", "", 60, (shell("good", GOOD), shell("bad", "echo torch.OutOfMemoryError: CUDA out of memory >&2; exit 3"))),
        Part("b", "", 3, (shell("hangs", f"{GOOD}; sleep 60", 3), shell("late", GOOD))),
        Part("c", "", 60, (shell("without-figures", "true"), shell("absent", GOOD)._replace(needs=("no_such_package",)))),
    )
    assert program.carry_on(parts, setting, tmp_path, ENDLESS, [])
    found = program.load_results(tmp_path, parts)
    assert found["a"]["good"]["status"] == "done" and found["a"]["good"]["figures"] == {"figure": 1}
    assert found["a"]["bad"]["status"] == "failed" and "CUDA out of memory" in found["a"]["bad"]["reason"]
    assert found["b"]["hangs"]["status"] == "out of time" and found["b"]["hangs"]["figures"] == {"figure": 1}
    assert found["b"]["late"]["status"] == "out of time" and "used up" in found["b"]["late"]["reason"]
    assert found["c"]["without-figures"]["status"] == "failed" and "figures.json" in found["c"]["without-figures"]["reason"]
    assert found["c"]["absent"] == found["c"]["absent"] | {"status": "left out", "reason": "not installed: no_such_package"}
    assert attempts(setting) == ["good", "bad", "hangs", "without-figures"]
    assert program.carry_on(parts, setting, tmp_path, ENDLESS, ["a/b*"])  # repeats what is named, and nothing else
    assert attempts(setting)[4:] == ["bad"]


def test_a_kill_loses_only_the_run_at_work_and_ends_its_processes(setting, tmp_path):
    pid_file = tmp_path / "pid"
    slow = f"if [ ! -e {pid_file} ]; then echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 60; fi; {GOOD}"
    parts = (Part("a", "", 90, (shell("first", GOOD), shell("second", slow), shell("third", GOOD))),)
    if (child := os.fork()) == 0:
        program.carry_on(parts, setting, tmp_path, ENDLESS, [])
        os._exit(0)
    until(pid_file.exists)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(program.load_results(tmp_path, parts)["a"]) == ["first"]
    until(lambda: not Path(f"/proc/{pid_file.read_text().strip()}").exists())
    assert program.carry_on(parts, setting, tmp_path, ENDLESS, [])
    assert attempts(setting) == ["first", "second", "second", "third"]
    assert all(result["status"] == "done" for result in program.load_results(tmp_path, parts)["a"].values())


# --------------------------------------------------------------------------------------------------------------- the figures


def report(step: int, rate: float) -> dict:
    values = {"step": step, "loss": 10.0 - step, "tokens_seen": 100 * step, "peak_memory_gib": 90.0 + step / 100}
    return values | {"tokens_per_second": rate, "tokens_per_second_per_device": rate, "mfu_palm": rate / 20_000}


def write_run(folder: Path, reports: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in reports))
    values = {"attention": "cudnn", "recomputed": "nothing", "precision": "bfloat16", "device": "NVIDIA H200"}
    (folder / "provenance.json").write_text(json.dumps([{"values": values}]))


def test_the_page_names_the_goals_that_are_missed_with_the_best_run_and_memory_far_from_its_estimate(tmp_path):
    write_run(tmp_path, [report(1, 50.0) | {"startup_seconds": 20.0}, report(4, 100.0), report(8, 12_000.0)])
    slow = {"status": "done", "seconds": 70.0, "command": "./run_train.sh", "commit": "0123456789abcdef", "changed": False}
    slow |= {"date": "2026-11-23T00:00:00Z", "figures": read_training(tmp_path)}
    write_run(tmp_path, [report(1, 50.0) | {"startup_seconds": 20.0}, report(4, 100.0), report(8, 15_000.0)])
    fast = slow | {"figures": read_training(tmp_path)}
    failed = {"status": "failed", "seconds": 30.0, "reason": "CUDA out of memory", "command": "./run_train.sh", "log": []}
    (tmp_path / "8b.json").write_text(json.dumps({"4k batch 4": slow, "8k batch 2": fast, "4k batch 6": failed}))
    estimates = {"8b/4k batch 4": {"total": 90.0}, "8b/8k batch 2": {"total": 80.0}}
    (tmp_path / "memory.json").write_text(json.dumps({"estimates": {"status": "done", "seconds": 1.0, "figures": estimates}}))
    page = write_page(tmp_path).read_text()
    assert "| 12,700 tokens/s | 12,000 tokens/s | 8b/4k batch 4 | **missed** by 5.5% |" in page
    assert "| 11,900 tokens/s | 15,000 tokens/s | 8b/8k batch 2 | reached |" in page
    assert "| within 3% | 12.6% at most | 8b/8k batch 2 | **missed** by 1 of 2 runs |" in page
    assert "failed: CUDA out of memory" in page and "commit 0123456789," in page
    assert (tmp_path / "runs.png").stat().st_size > 1000


# ----------------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_does_a_run_of_each_kind_and_writes_its_page(tmp_path):
    """The whole rehearsal takes five minutes on two cores; here are the parts that have every kind of run."""
    parts = ["start", "costs", "documents", "memory", "peers"]
    words = ["--rehearse", "--parts", ",".join(parts), "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    assert program.main(words) == 0
    found = program.load_results(tmp_path / "results")
    statuses = {f"{part}/{name}": result["status"] for part, each in found.items() for name, result in each.items()}
    assert statuses == dict.fromkeys((name for name in named(PARTS, ["*"]) if name.partition("/")[0] in parts), "done")
    page = (tmp_path / "results" / "README.md").read_text()
    assert "| within 3% |" in page and sys.executable not in page
    assert found["costs"]["8b 4k batch 4"]["figures"]["largest"]
    assert set(found["memory"]["estimates"]["figures"]) == set(training_runs(PARTS))
    assert found["peers"]["hf"]["figures"]["contestants"].keys() == {"titanlite", "plain"}
