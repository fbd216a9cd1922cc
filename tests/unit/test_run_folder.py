"""The run directory: one run at a time, a record of every start, files that are complete or unchanged."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from titanlite.config.operation import Checkpoint, Job
from titanlite.config.read import read_config
from titanlite.config.schema import Config, Training
from titanlite.ground.errors import UserError
from titanlite.ground.files import replace_file
from titanlite.launch import run_folder
from titanlite.launch.run_folder import RunLock, faults, other_run, owned_folders, record_start

_HOLD = """
import sys, time
from pathlib import Path
from titanlite.launch.run_folder import RunLock
held = RunLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_a_living_process_blocks_and_a_killed_one_does_not(tmp_path):
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(UserError, match=rf"process {holder.pid} on .*job\.dump_folder"):
                RunLock(tmp_path)
            assert f"process {holder.pid} on " in other_run(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert other_run(tmp_path) == ""
    with closing(RunLock(tmp_path)):
        assert f"process {os.getpid()} on " in other_run(tmp_path)


def test_removing_the_lock_file_does_not_admit_a_second_run_unnoticed(tmp_path, caplog):
    with closing(RunLock(tmp_path)) as held:
        held.keep()
        assert caplog.text == ""
        (tmp_path / ".lock").unlink()
        held.keep()  # as in every report and save
        assert f"{tmp_path / '.lock'}: somebody has removed or replaced it; made again" in caplog.text
        with pytest.raises(UserError, match=f"process {os.getpid()} on "):
            RunLock(tmp_path)
    assert other_run(tmp_path) == ""


def test_if_a_removed_lock_file_admits_two_runs_the_first_one_ends(tmp_path):
    with closing(RunLock(tmp_path)) as first:
        (tmp_path / ".lock").unlink()
        with closing(RunLock(tmp_path)), pytest.raises(UserError, match="another run is training in it"):
            first.keep()


def test_a_folder_that_cannot_be_written_is_named_and_no_lock_is_left(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(UserError, match="checkpoint: cannot be written"):
        RunLock(tmp_path, tmp_path / "checkpoint")
    assert other_run(tmp_path) == ""


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_one_warning_and_other_errors_end_the_start(tmp_path, monkeypatch, caplog, number):
    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.fcntl, "flock", fail)
    run_folder._warn_of_no_locks.cache_clear()
    with contextlib.nullcontext() if number == errno.ENOLCK else pytest.raises(UserError, match="cannot be written"):
        RunLock(tmp_path, tmp_path / "checkpoint").close()
        assert other_run(tmp_path) == ""
    assert caplog.text.count("has no locks (No locks available)") == (number == errno.ENOLCK)


# ------------------------------------------------------------------------------------------- a folder of checkpoints for two


def run_in(folder: Path) -> Config:
    return Config(job=Job(dump_folder=str(folder)), checkpoint=Checkpoint(enable=True))


@pytest.fixture
def linked(tmp_path) -> tuple[Config, Config]:
    """A run whose checkpoints are on another disk, by a link, and a copy of it by `cp -a`."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint").symlink_to("../disk")
    RunLock(*owned_folders(run_in(tmp_path / "a"))).close()  # it has trained
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    return run_in(tmp_path / "a"), run_in(tmp_path / "b")


def test_two_runs_never_train_at_once_in_one_folder_of_checkpoints(linked):
    a, b = linked
    with closing(RunLock(*owned_folders(a))):
        with pytest.raises(UserError, match=rf"b/checkpoint: another run is training in it \(process {os.getpid()} on "):
            RunLock(*owned_folders(b))
        assert other_run(owned_folders(b)[0]) == ""  # it is free again
    RunLock(*owned_folders(b)).close()


def test_a_copied_link_does_not_lead_a_run_to_the_checkpoints_of_another(linked):
    a, b = linked
    assert list(faults(a)) == []
    [fault] = faults(b)
    assert f"b/checkpoint: leads to the checkpoints of the run in {a.job.dump_folder}" in fault
    (Path(b.job.dump_folder) / "checkpoint").unlink()
    assert list(faults(b)) == []


@pytest.mark.parametrize("change", ["copied", "moved", "by another name", "original removed", "link moved", "an old run"])
def test_a_run_may_be_copied_with_its_checkpoints_moved_and_reached_by_other_names(tmp_path, linked, change):
    folder = tmp_path / "c"
    if change == "copied":  # as with `cp -aL`
        shutil.copytree(tmp_path / "a", folder)
    elif change == "moved":
        (tmp_path / "a").rename(folder)
    elif change == "by another name":
        folder.symlink_to("a")
    elif change == "original removed":
        shutil.rmtree(tmp_path / "a")
        folder = tmp_path / "b"
    elif change == "link moved":
        shutil.copytree(tmp_path / "disk", tmp_path / "new")
        (tmp_path / "a" / "checkpoint").unlink()
        (tmp_path / "a" / "checkpoint").symlink_to("../new")
        folder = tmp_path / "a"
    else:  # earlier versions have no lock file there
        (tmp_path / "disk" / ".lock").unlink()
        folder = tmp_path / "a"
    assert list(faults(run_in(folder))) == []
    RunLock(*owned_folders(run_in(folder))).close()
    assert list(faults(run_in(folder))) == []


# ---------------------------------------------------------------------------------------------------------------- the record


def test_every_start_is_recorded_and_the_configuration_is_that_of_the_latest(tmp_path):
    first = Config(job=Job(dump_folder=str(tmp_path), description='a "quoted" name'), training=Training(steps=5))
    second = Config(job=Job(dump_folder=str(tmp_path)), training=Training(steps=7, seq_len=33))
    record_start(first, {"resumed_step": 0, "values": {"mesh": "one process"}})
    assert read_config(tmp_path / "config.toml", []) == first
    record_start(second, {"resumed_step": 5})
    assert read_config(tmp_path / "config.toml", []) == second

    starts = json.loads((tmp_path / "provenance.json").read_text())
    assert [start["resumed_step"] for start in starts] == [0, 5]
    assert starts[0]["values"] == {"mesh": "one process"}


def test_changes_are_recorded_in_any_encoding_and_of_any_owner(tmp_path, monkeypatch):
    path, git = tmp_path / "notes.txt", ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    path.write_bytes("café\n".encode("latin-1"))
    shown = (["config", "color.ui", "always"], ["config", "diff.external", "true"])  # which a user reads, and nobody applies
    for words in (["init", "-q"], *shown, ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    path.write_bytes("thé\n".encode("latin-1"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container, whose user is another one
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "titanlite/launch/run_folder.py"))
    record_start(Config(job=Job(dump_folder=str(tmp_path / "out"))), {})
    assert "\n+th\N{REPLACEMENT CHARACTER}\n" in json.loads((tmp_path / "out/provenance.json").read_text())[0]["git"]["diff"]
    # a repository of another user around the folder of packages, whose configuration git would run
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "site-packages/titanlite/launch/run_folder.py"))
    (tmp_path / "site-packages").mkdir()
    record_start(Config(job=Job(dump_folder=str(tmp_path / "other"))), {})
    assert json.loads((tmp_path / "other/provenance.json").read_text())[0]["git"] is None


def test_a_failed_replacement_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    replace_file(path, "old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("titanlite.launch.run_folder.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "new")
    assert path.read_text() == "old"
