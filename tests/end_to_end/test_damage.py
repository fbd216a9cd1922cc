"""Damaged checkpoints, disks that cannot be written and folders in use, as a user of run_train.sh meets them."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.end_to_end.forked import Done, train
from tests.end_to_end.launcher import Ended, finish, launch, run
from tests.end_to_end.test_run_train import reports, when_training, working_folder
from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import step_folder
from titanlite.launch.stop import EXIT_CODE

WORDS = ["--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0", "--lr_scheduler.total_steps", "10"]


def start(folder: Path, steps: int, *words: str) -> Ended:
    return run("run.toml", "--training.steps", str(steps), *WORDS, *words, folder=folder, NGPU="2")


def trained(folder: Path, steps: int) -> Done:
    """The same run without its launcher."""
    ended = train("run.toml", "--training.steps", steps, *WORDS, folder=folder, ranks=2)
    assert ended.code == 0, ended.err
    return ended


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in reports(folder / "out")]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run but for its lock, which every start takes."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def spoil(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    spoilt = bytearray(path.read_bytes())
    spoilt[len(spoilt) // 2] ^= 16
    path.write_bytes(spoilt)


def assert_refused(ended: Ended, *words: str) -> None:
    """That a start ended at once, with a fault of the user's and in words that he can use."""
    assert (ended.code, ended.out, ended.left) == (2, "", []), ended.err
    assert [part for part in words if part not in ended.err] == [], ended.err
    assert "Traceback" not in ended.err


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A working folder with a run that has checkpoints of steps 2 and 4."""
    folder = working_folder(tmp_path_factory.mktemp("half"))
    trained(folder, 4)
    return folder


@pytest.fixture
def copy(half, tmp_path) -> Path:
    """A copy of that, to be damaged."""
    return Path(shutil.copytree(half, tmp_path / "copy"))


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(copy, tmp_path):
    damaged = copy / "out/checkpoint/step-00000004/__1_0.distcp"
    spoil(damaged)
    ended = trained(copy, 6)
    assert ended.err.count("step-00000004/__1_0.distcp: is damaged: its checksum is") == 1
    assert "resumed from out/checkpoint/step-00000002" in ended.err
    assert "set aside out/checkpoint/step-00000004.aside-1" in ended.err
    (tmp_path / "whole").mkdir()
    whole = working_folder(tmp_path / "whole")
    trained(whole, 6)
    assert losses(copy) == losses(whole)


def test_all_damaged_ends_with_their_names_and_changes_nothing(copy):
    for step, name in ((2, ".metadata"), (4, "manifest.json")):
        spoil(step_folder(copy / "out/checkpoint", step) / name)
    before = contents(copy)
    words = ["step-00000002/.metadata: is damaged", "step-00000004/manifest.json: is damaged", "all 2 checkpoints are damaged"]
    assert_refused(start(copy, 6), *words, "rename the folder to start from scratch")
    assert contents(copy) == before


@pytest.mark.slow  # tests/distributed/test_load.py has it without the launcher
def test_a_damaged_checkpoint_that_is_asked_for_by_its_step_is_not_replaced_by_another(copy):
    spoil(copy / "out/checkpoint/step-00000002/__0_0.distcp")
    before = contents(copy)
    assert_refused(start(copy, 6, "--checkpoint.load_step", "2"), "step-00000002/__0_0.distcp: is damaged: its checksum")
    assert contents(copy) == before


@pytest.mark.slow  # so does test_run_train.py, without a checkpoint
def test_a_second_run_in_a_folder_is_refused_and_the_first_one_unharmed(tmp_path):
    folder = working_folder(tmp_path)
    words = ["--training.steps", "1000000", "--checkpoint.interval", "10", "--checkpoint.keep_latest_k", "2"]
    first = launch("run.toml", *words, folder=folder, NGPU="2")
    try:
        when_training(first, folder / "out")
        second = run("run.toml", *words, folder=folder, NGPU="2")
        assert_refused(second, "out: another run is training in it")
    finally:
        first.process.send_signal(signal.SIGTERM)
    ended = finish(first)
    assert (ended.code, ended.left) == (EXIT_CODE, []), ended.err
    steps = [step for step, _ in losses(folder)]
    assert steps == list(range(1, len(steps) + 1))
    newest = step_folder(folder / "out/checkpoint", len(steps))
    assert list(load.faults(newest, manifest.read(newest))) == []
