"""Somebody removes, renames or replaces the files of a run while it trains, as logrotate does: no later report is lost."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from titanlite.config.operation import Checkpoint, Job, Metrics
from titanlite.config.schema import Config
from titanlite.launch import stacks
from titanlite.launch.run_folder import RunLock, owned_folders, record_start
from titanlite.loop.divergence import Incidents, StepRecord
from titanlite.loop.metrics import Reporter

STEPS = 60
_BAD = 10  # steps between spikes


def _away(path: Path) -> Path:
    """A new name next to a file or folder."""
    return next(p for n in range(1000) if not os.path.lexists(p := path.with_name(f"{path.name}.away-{n}")))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    while True:
        path.rename(_away(path))
        with contextlib.suppress(FileExistsError):  # TensorBoard's thread, which opens its file by name, was faster
            make(path)
            return


ACTIONS: dict[str, Callable[[Path], object]] = {
    "remove": lambda path: path.unlink(),
    "rename": lambda path: path.rename(_away(path)),
    "replace by a file": lambda path: _replace(path, lambda new: new.write_text("of another program\n")),
    "replace by a link": lambda path: _replace(path, lambda new: new.symlink_to("/nowhere")),
    "replace by a FIFO": lambda path: _replace(path, os.mkfifo),
    "replace by a folder": lambda path: _replace(path, os.mkdir),
    "rename its folder": lambda path: path.parent.rename(_away(path.parent)),
}
_IN_THE_WAY = ("replace by a link", "replace by a FIFO", "replace by a folder")  # until the user removes it


@contextmanager
def _training(config: Config) -> Iterator[Callable[[int], None]]:
    """Everything that rank 0 of a run writes, without training; -> a function that reports a step."""
    dump = Path(config.job.dump_folder)
    lock = RunLock(*owned_folders(config))
    stacks.open_dump(dump, 0)
    kept = [stacks.keep, lock.keep, *(file.keep for file in record_start(config, {}))]
    reporter, incidents = Reporter(config, 1, active=True), Incidents(config, 1, 1, active=True)

    def report(step: int) -> None:
        incidents.judge([StepRecord(step, step, 50.0 if step % _BAD == 0 else 1.0 + step % 3, 1.0)], None)
        for keep in kept:
            keep()
        reporter.report(step, {"loss": float(step)})

    try:
        yield report
    finally:
        reporter.close()
        stacks.close_dump()
        lock.close()


def _lines(path: Path) -> set[int]:
    """The steps of a .jsonl file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {json.loads(line)["step"] for line in lines if line.startswith("{")}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's: its folder is gone
@pytest.mark.parametrize("seed", range(6))
def test_every_later_report_is_written_and_the_run_continues(tmp_path, seed):
    draw, dump = random.Random(seed), tmp_path / "run"
    config = Config(
        job=Job(dump_folder=str(dump)),
        checkpoint=Checkpoint(enable=True),
        metrics=Metrics(enable_tensorboard=True, spike_window=8, spike_threshold=5.0),
    )
    last = dict.fromkeys(("metrics.jsonl", "incidents.jsonl"), 0)  # the last step at which a file was changed
    obstacle: Path | None = None  # what is in the way until the next step
    with _training(config) as report:
        for step in range(1, STEPS + 1):
            if obstacle is not None and os.path.lexists(obstacle):
                shutil.rmtree(obstacle) if obstacle.is_dir() else obstacle.unlink()
            obstacle = None
            files = [path for path in sorted(dump.rglob("*")) if path.is_file() and ".away-" not in str(path)]
            if files and step < STEPS - 5 and draw.random() < 0.5:
                path, action = draw.choice(files), draw.choice([*ACTIONS])
                if path.name.startswith("events") and action == "replace by a FIFO":
                    action = "remove"  # TensorBoard opens its file whenever it writes, and would wait for a reader
                ACTIONS[action](path)
                obstacle = path if action in _IN_THE_WAY else None
                everything = action == "rename its folder"
                last = {kind: step - 1 if everything or path.name.startswith(kind) else at for kind, at in last.items()}
            report(step)
    steps = range(1, STEPS + 1)
    assert _lines(dump / "metrics.jsonl") >= {step for step in steps if step > last["metrics.jsonl"]}
    assert _lines(dump / "incidents.jsonl") >= {step for step in steps if step % _BAD == 0 and step > last["incidents.jsonl"]}
    assert json.loads((dump / "provenance.json").read_text())[0]["command"]
    assert 'dump_folder = "' in (dump / "config.toml").read_text()
    assert "process" in (dump / ".lock").read_text() and "process" in (dump / "checkpoint/.lock").read_text()


def test_an_undisturbed_run_logs_no_warning(tmp_path, caplog):
    with _training(Config(job=Job(dump_folder=str(tmp_path)), checkpoint=Checkpoint(enable=True))) as report:
        for step in range(1, 5):
            report(step)
    assert caplog.text == "" and _lines(tmp_path / "metrics.jsonl") == {1, 2, 3, 4}
