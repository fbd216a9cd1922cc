"""The folder of a run's checkpoints: what counts as one, what is kept, what a killed run leaves, and free disk space."""

import errno
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.limited import disk
from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import check_shared, clean_up, disk_space_faults, list_steps, retire, step_folder, superfluous
from titanlite.checkpoint.save import Saver
from titanlite.config.operation import Checkpoint
from titanlite.ground.errors import UserError

pytestmark = pytest.mark.usefixtures("group_of_file")
RUN = "8f0e"
NUMBERS = {"samples": 8, "global_batch": 8, "data": {}, "config": {}, "architecture": {}, "run": RUN}


def make(folder: Path, *steps: int) -> None:
    """Folders with the names of checkpoints, and a manifest of two other files in each."""
    for step in steps:
        step_folder(folder, step).mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp"):
            (step_folder(folder, step) / name).write_text(str(step))
        files = {name: manifest.FileDigest(len(str(step)), "0" * 32) for name in (".metadata", "__0_0.distcp")}
        manifest.write(step_folder(folder, step), manifest.Manifest({"step": step, **NUMBERS}, files))


def found(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


# ------------------------------------------------------------------------------------------------------------ what is there


def test_only_complete_checkpoints_are_listed_by_number(tmp_path):
    make(tmp_path, 100_000_000, 99_999_999, 5, 20)  # nine digits come after eight
    for name in (".step-00000030.unfinished", "step-00000040.aside-1", "step-00000005-hf", "step-41", "xstep-00000043"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000045").write_text("a file")
    assert list_steps(tmp_path) == [5, 20, 99_999_999, 100_000_000]
    assert list_steps(tmp_path / "missing") == []


def test_a_manifest_that_no_start_could_read_is_not_committed(tmp_path):
    """The state of a user's own data is in it, and every later start would have called the checkpoint damaged."""
    unfinished, final = tmp_path / ".step-00000010.unfinished", step_folder(tmp_path, 10)
    unfinished.mkdir()
    with pytest.raises(UserError, match="an integer of more than 40 digits"):
        manifest.commit(unfinished, final, manifest.Manifest({"step": 10, **NUMBERS, "stream": [10**50]}, {}))
    assert not final.exists()
    manifest.commit(unfinished, final, manifest.Manifest({"step": 10, **NUMBERS, "stream": [10**30]}, {}))
    assert list_steps(tmp_path) == [10]


# ----------------------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("keys", "steps", "deleted"),
    [
        ({"keep_latest_k": 0}, range(0, 100, 5), []),
        ({"keep_latest_k": 1}, [15, 5, 10], [5, 10]),
        ({"keep_latest_k": 2, "keep_every_n_steps": 10}, [5, 10, 15, 20, 25], [5, 15]),
        ({"keep_latest_k": 1, "load_step": 0}, [0, 5], []),
        ({"keep_latest_k": 1, "load_step": 15, "keep_every_n_steps": 10}, [5, 10, 15, 20, 25], [5]),
    ],
)
def test_the_newest_every_nth_and_the_one_of_load_step_are_kept(keys, steps, deleted):
    assert superfluous(steps, Checkpoint(enable=True, **keys)) == deleted


def test_retention_keeps_checkpoints_of_another_run_and_deletes_those_without_a_run(tmp_path, caplog):
    make(tmp_path, 5, 10, 15, 20)
    for step, run in ((5, {"run": "another"}), (10, {}), (15, {"run": ""})):
        old = manifest.read(step_folder(tmp_path, step))
        numbers = {name: value for name, value in old.numbers.items() if name != "run"}
        manifest.write(step_folder(tmp_path, step), manifest.Manifest(numbers | run, old.files))
    retire(tmp_path, Checkpoint(enable=True, keep_latest_k=1), RUN)
    assert found(tmp_path) == names(5, 20)
    assert f"{step_folder(tmp_path, 5)}: cannot be deleted: it is of another run" in caplog.text


def test_a_save_succeeds_even_if_retention_has_no_file_handles(tmp_path, monkeypatch, caplog):
    saver = Saver(tmp_path, Checkpoint(enable=True, keep_latest_k=1), 60)
    saver.save(5, {"a": torch.ones(2)}, NUMBERS)
    saver.wait()
    with monkeypatch.context() as patched:
        patched.setattr("titanlite.checkpoint.folder.list_steps", Mock(side_effect=OSError(errno.EMFILE, "Too many files")))
        saver.save(10, {"a": torch.ones(2)}, NUMBERS)
        saver.finish()
    assert list_steps(tmp_path) == [5, 10] and "old checkpoints are not deleted: " in caplog.text
    saver.save(15, {"a": torch.ones(2)}, NUMBERS)
    saver.finish()
    assert list_steps(tmp_path) == [15]


def test_an_interrupted_deletion_leaves_no_partial_checkpoint_and_is_completed_later(tmp_path, monkeypatch, caplog):
    make(tmp_path, 5, 10, 15)
    keys = Checkpoint(enable=True, keep_latest_k=2)

    def killed(path: Path) -> None:
        (path / manifest.FILE).unlink()
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        retire(tmp_path, keys, RUN)
    assert found(tmp_path) == [".step-00000005.retired", *names(10, 15)]
    assert list_steps(tmp_path) == [10, 15]
    assert "step-00000005.retired: cannot be deleted: killed" in caplog.text
    make(tmp_path, 20)
    retire(tmp_path, keys, RUN)
    assert found(tmp_path) == names(15, 20)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: is missing"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json: is damaged"),
        (lambda path: (path / "notes.txt").write_text("of the user's"), "its manifest does not list notes.txt"),
        (lambda path: shutil.copy(step_folder(path.parent, 10) / "manifest.json", path), "its manifest is that of step 10"),
        (lambda path: path.rename(path.parent.parent / "elsewhere") and path.symlink_to("../elsewhere"), "it is a link"),
    ],
)
def test_retention_deletes_only_what_a_manifest_proves_to_be_a_checkpoint(tmp_path, caplog, change, reason):
    folder = tmp_path / "checkpoint"
    make(folder, 5, 10, 15)
    change(step_folder(folder, 5))
    paths = [*folder.rglob("*"), *tmp_path.glob("else*/*")]
    before = [(path.lstat().st_ino, path.lstat().st_mtime_ns) for path in paths]  # reading may change the time of access
    retire(folder, Checkpoint(enable=True, keep_latest_k=2), RUN)
    assert [(path.lstat().st_ino, path.lstat().st_mtime_ns) for path in paths] == before
    assert f"{step_folder(folder, 5)}: cannot be deleted: " in caplog.text and reason in caplog.text


# ---------------------------------------------------------------------------------------------------------------- cleaning up


def test_a_resume_deletes_unfinished_checkpoints_and_sets_later_ones_aside(tmp_path):
    make(tmp_path, 5, 10, 15, 20)
    for name in ("25.unfinished", "01.retired", "15-hf.unfinished"):
        shutil.copytree(step_folder(tmp_path, 5), tmp_path / f".step-000000{name}")
    for name in ("20.aside-1", "20.aside-2", "10-hf", "15-hf"):  # exports are treated the same way
        (tmp_path / f"step-000000{name}").mkdir()
    (tmp_path / "notes.txt").write_text("of the user's")
    aside = ["step-00000015-hf.aside-1", "step-00000015.aside-1", *(f"step-00000020.aside-{n}" for n in (1, 2, 3))]
    for _ in range(2):
        clean_up(tmp_path, 10)
        assert found(tmp_path) == ["notes.txt", *names(5, 10), "step-00000010-hf", *aside]
    assert manifest.read(tmp_path / "step-00000020.aside-3").numbers["step"] == 20


# ---------------------------------------------------------------------------------------------------------------------- room


@pytest.mark.parametrize(("keep", "have", "needed"), [(10, 9, 2), (10, 10, 1), (1, 1, 1), (0, 50, 2)])
def test_there_must_be_room_for_two_checkpoints_or_for_one_if_an_old_one_is_deleted(tmp_path, monkeypatch, keep, have, needed):
    """While one is written, those that it replaces still exist."""
    (tmp_path / "saves").mkdir()
    make(tmp_path / "saves", *range(have))
    keys, size, free = Checkpoint(enable=True, keep_latest_k=keep), 2**30, {tmp_path / "saves": needed * 2**30, tmp_path: 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free[path]))
    assert list(disk_space_faults(tmp_path / "saves", size, keys)) == []
    [fault] = disk_space_faults(tmp_path / "saves", size + 1, keys)
    assert f"{needed} checkpoints of this run need {needed}.00 GiB" in fault and f"saves has {needed}.00 GiB free" in fault
    [fault] = disk_space_faults(tmp_path / "not/there/yet", size, keys)
    assert f"{tmp_path} has 0.00 GiB free" in fault


@pytest.mark.parametrize(("every", "needed"), [(0, 1), (2000, 1), (500, 2)])
def test_checkpoints_that_are_never_deleted_make_no_room(tmp_path, monkeypatch, every, needed):
    make(tmp_path, 500, 1000, 1500)
    keys = Checkpoint(enable=True, keep_latest_k=2, keep_every_n_steps=every)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1500))
    assert len([*disk_space_faults(tmp_path, 1000, keys)]) == needed - 1


def test_unfinished_checkpoints_of_a_killed_run_count_as_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1500))
    assert list(disk_space_faults(tmp_path, 1000, Checkpoint(enable=True)))
    for name in (".step-00000010.unfinished", ".step-00000005.retired"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(bytes(250))
    assert not list(disk_space_faults(tmp_path, 1000, Checkpoint(enable=True)))


# -------------------------------------------------------------------------------------------------------------- trying it out


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with disk(tmp_path / "only", "ro") as folder, pytest.raises(UserError, match="only: cannot be written: "):
        check_shared(folder)


# ------------------------------------------------------------------------------------------------------- the moment of truth


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows a file's name by its descriptor")
def test_a_folder_gets_the_name_of_a_checkpoint_only_when_it_is_complete_and_on_the_disk(tmp_path, monkeypatch):
    """Even if the machine crashes: before the rename there is nothing, after it everything is on the disk. Data that are still
    in a buffer when a file is synced would be missing.
    """
    events: list[Path] = []
    sizes: dict[str, int] = {}
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        fsync(handle)
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        sizes[events[-1].name.removesuffix(".tmp")] = os.fstat(handle).st_size

    def renamed(path: Path, target: Path) -> Path:
        if Path(target).name == "step-00000010":
            contents = manifest.read(path)
            assert list(load.faults(path, contents)) == []
            assert {name: sizes[name] for name in contents.files} == {name: d.bytes for name, d in contents.files.items()}
            replaced = (".metadata", "manifest.json")
            files = {path / f"{name}.tmp" if name in replaced else path / name for name in os.listdir(path)}
            assert files | {path} <= set(events)
            assert events.index(path) > max(events.index(file) for file in files)
            events.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    saver = Saver(tmp_path, Checkpoint(enable=True), 60)
    saver.save(10, {"a": torch.arange(1000.0)}, NUMBERS)
    saver.finish()
    assert events == [tmp_path]
