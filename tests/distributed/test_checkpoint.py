"""Checkpoints on meshes: every kind of damage is seen, a save that fails costs nothing else, and writing beside training
stores what was, not what has become of it since."""

import errno
import gc
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, full_run, mesh_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, Degrees, reports, run_config, stored
from titanlite.checkpoint import load, manifest, save
from titanlite.checkpoint.folder import step_folder, try_out
from titanlite.checkpoint.save import Saver
from titanlite.checkpoint.storage import METADATA, Writer
from titanlite.checkpoint.tensors import run_tensors
from titanlite.config import Checkpoint, Config
from titanlite.errors import UserError
from titanlite.optimizer import build_optimizer, create_state
from titanlite.train import build_model
from titanlite.zoo import load_family

HERE = "tests.distributed.test_checkpoint"
SHARD = {"dp_shard": 2}
root_on_linux = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="only root on Linux can mount a disk of its own"
)


# ------------------------------------------------------------------------------------------------------ what the ranks run


class Told(NamedTuple):
    """What a rank's run has said, and which checkpoints it has read tensors from."""

    log: list[str]
    error: str  # the UserError that ended the run, or nothing
    read: list[str]


def attempt(degrees: Degrees, config: Config, trouble: tuple = ()) -> Told:
    """A whole run, with trouble of a kind in it."""
    log: list[str] = []
    read: list[str] = []
    error, real = "", dcp.load

    def recorded(tensors: dict[str, Tensor], storage_reader: Any) -> None:
        read.append(str(storage_reader.path))
        real(tensors, storage_reader=storage_reader)

    logger, handler = logging.getLogger("titanlite"), logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    try:
        with TROUBLE[trouble[0]](*trouble[1:]) if trouble else nullcontext(), patch.object(load.dcp, "load", recorded):
            full_run(degrees, config)
    except UserError as raised:
        error = str(raised)
    finally:
        logger.removeHandler(handler)
        logger.level = level
        gc.enable()  # a run that is ended by an error leaves it off
    dist.barrier()
    return Told(log, error, read)


@contextmanager
def slow() -> Iterator[None]:
    """Writing begins so late that training has changed the tensors meanwhile."""
    real, waiting = Writer.write_data, threading.Event()

    def late(self: Writer, *words: Any) -> Any:
        waiting.wait(0.3)
        return real(self, *words)

    with patch.object(Writer, "write_data", late):
        yield


@contextmanager
def no_write(rank: int, step: int) -> Iterator[None]:
    """One rank cannot write its part of one checkpoint to its end."""
    real = Writer.write_data

    def failing(self: Writer, *words: Any) -> Any:
        written = real(self, *words)
        if dist.get_rank() == rank and f"step-{step:08d}" in str(self.path):
            raise OSError(errno.EIO, "the cable is out")
        return written

    with patch.object(Writer, "write_data", failing):
        yield


@contextmanager
def no_commit(step: int) -> Iterator[None]:
    """All have written, and the manifest cannot be."""
    real = manifest.write

    def failing(folder: Path, contents: manifest.Manifest) -> None:
        real(folder, contents)
        if f"step-{step:08d}" in folder.name:
            raise OSError(errno.EIO, "the cable is out")

    with patch.object(save.manifest, "write", failing):
        yield


@contextmanager
def wrong_on_disk(rank: int, step: int) -> Iterator[None]:
    """A rank's disk keeps something else than what was written to it."""
    real = FileSystemWriter.write_data

    def failing(self: Writer, *words: Any) -> Any:
        written = real(self, *words)
        if dist.get_rank() == rank and f"step-{step:08d}" in str(self.path):
            flip(next(Path(self.path).glob(f"__{rank}_*")))
        return written

    with patch.object(FileSystemWriter, "write_data", failing):
        yield


@contextmanager
def wrong_metadata_on_disk(step: int) -> Iterator[None]:
    """As `wrong_on_disk`, for what rank 0 writes for all."""
    real = FileSystemWriter.finish

    def failing(self: Writer, *words: Any) -> None:
        real(self, *words)
        if f"step-{step:08d}" in str(self.path):
            flip(Path(self.path) / METADATA)

    with patch.object(FileSystemWriter, "finish", failing):
        yield


@contextmanager
def full_disk_until_it_is_said(ballast: Path) -> Iterator[None]:
    """Somebody deletes what has filled the disk as soon as the log complains."""

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "could not be saved" in record.getMessage():
                ballast.unlink(missing_ok=True)

    handler = Watching()
    logging.getLogger("titanlite").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("titanlite").removeHandler(handler)


TROUBLE: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (slow, no_write, no_commit, wrong_on_disk, wrong_metadata_on_disk, full_disk_until_it_is_said)
}


def sample_tensors(degrees: Degrees, value: float) -> dict[str, Tensor]:
    """Tensors of all the kinds that a run has, full of one value."""
    mesh = mesh_of(degrees)
    shardings = [[Replicate()] * mesh.ndim, [*([Replicate()] * (mesh.ndim - 1)), Shard(0)]]
    shardings += [[*([Replicate()] * (mesh.ndim - 2)), Shard(0), Shard(1)]] if mesh.ndim > 1 else []
    tensors = {f"sharded.{n}": distribute_tensor(torch.full((7, 5), value), mesh, s) for n, s in enumerate(shardings)}
    plain = {"matrix": torch.full((3, 4), value), "half": torch.full((3,), value, dtype=torch.bfloat16)}
    return tensors | plain | {"count": torch.tensor(int(value), dtype=torch.int32), "scale": torch.tensor(value)}


def save_twice(degrees: Degrees, folder: Path) -> tuple[list[str], bool]:
    """Two saves beside training, the first of which takes long; what happened in which order, and whether the first save had
    been waited for when `save` returned."""
    events: list[str] = []
    free, real = threading.Event(), Writer.write_data

    def held_up(self: Writer, *words: Any) -> Any:
        events.append("begin")
        free.wait(30)
        written = real(self, *words)
        events.append("end")
        return written

    saver = Saver(folder, Checkpoint(enable=True, async_mode="async"), 60)
    tensors = sample_tensors(degrees, 1.0)
    with patch.object(Writer, "write_data", held_up):
        saver.save(1, tensors, numbers())
        waited = "end" in events
        for tensor in tensors.values():  # as an optimizer's next step would
            tensor.mul_(2)
        threading.Timer(0.3, free.set).start()
        saver.save(2, tensors, numbers())
        for tensor in tensors.values():
            tensor.zero_()
        saver.finish()
    dist.barrier()
    return events, waited


def save_a_number(folder: Path) -> None:
    """A save in which one rank has something to write and all others nothing."""
    saver = Saver(folder, Checkpoint(enable=True), 60)
    saver.save(1, {"scale": torch.tensor(2.0)}, numbers())
    saver.finish()
    found = {"scale": torch.tensor(0.0)}
    load.load_tensors(folder / "step-00000001", load.verified(folder / "step-00000001"), found)
    assert found["scale"] == 2.0


def move(degrees: Degrees, config: Config, source: Path, folder: Path) -> None:
    """Loads a checkpoint of a run onto a mesh, and saves from there what has been loaded."""
    family = load_family(config.model.name, config.model.flavor)
    model = build_model(family, config, mesh_of(degrees), CPU)
    optimizer = build_optimizer(model, config.optimizer)
    create_state(optimizer)
    tensors, found = run_tensors(model, optimizer, None), load.verified(source)
    load.load_tensors(source, found, tensors)
    saver = Saver(folder, Checkpoint(enable=True), 60)
    saver.save(found.numbers["step"], tensors, numbers())
    saver.finish()
    dist.barrier()


def numbers() -> dict[str, Any]:
    """What a manifest must hold besides the step."""
    return {"samples": 8, "global_batch": 8, "data": {}, "schedule": {}, "config": {}, "architecture": {}}


def try_folder(folders: list[Path]) -> str:
    """What is wrong with a folder that each rank sees in a place of its own."""
    try:
        try_out(folders[dist.get_rank()])
    except UserError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------------------ what they share


def ranks_of(degrees: Degrees) -> int:
    return math.prod(degrees.values())


def train(pools: dict[int, Pool], degrees: Degrees, folder: Path, steps: int, trouble: tuple = (), **sections) -> list[Told]:
    """A run of so many steps with a checkpoint every second one, all of which are kept; what each rank told."""
    keys = {"interval": 2, "keep_latest_k": 0, **sections.pop("checkpoint", {})}
    config = run_config(degrees, folder, steps, checkpoint=keys, **sections)
    return pools[ranks_of(degrees)].run(f"{HERE}:attempt", degrees=degrees, config=config, trouble=trouble)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(report["step"], report["loss"]) for report in reports(folder)]


def resumed(folder: Path) -> list[int]:
    """At which step each start of a run began."""
    return [start["resumed_step"] for start in json.loads((folder / "provenance.json").read_text())]


def assert_same(found: Path, expected: Path, step: int) -> None:
    """That two runs are the same one, bit for bit."""
    assert losses(found) == losses(expected)
    here, there = stored(found, step), stored(expected, step)
    assert here.keys() == there.keys()
    assert [name for name in there if not torch.equal(here[name], there[name])] == []


def assert_sound(source: Path) -> None:
    assert list(load.faults(source, manifest.read(source))) == []


# ------------------------------------------------------------------------------------------------------------------- damage


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def cut(path: Path, other: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def exchange(path: Path, other: Path) -> None:
    assert path.read_bytes() != other.read_bytes()
    shutil.copy(other, path)


FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
SIZE, SUM, NOT_JSON = "is damaged: it has ", "is damaged: its checksum is ", "is damaged: it is not the JSON that was written"
# what is done to a file, what is said of it, and what where it is the manifest
DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str, str]] = {
    "truncated": (cut, SIZE, "is damaged: its checksum is not"),  # the manifest's last byte is a line end: still JSON
    "flipped": (lambda path, other: flip(path), SUM, "is damaged: "),
    "emptied": (lambda path, other: path.write_bytes(b""), SIZE, NOT_JSON),
    "removed": (lambda path, other: path.unlink(), "is missing", "is missing"),
    "of another step": (exchange, SUM, "is damaged: it belongs to step 2"),
}


@pytest.fixture(scope="module")
def whole(pools, tmp_path_factory) -> Path:
    """A run of six steps on two ranks that nothing has happened to, with the losses of all."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(pools, SHARD, folder, 6)[0].error == ""
    return folder


@pytest.fixture(scope="module")
def half(pools, tmp_path_factory) -> Path:
    """The same run, stopped after step 4, with checkpoints of the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("half")
    assert train(pools, SHARD, folder, 4)[0].error == ""
    assert saved(folder) == names(2, 4)
    assert sorted(path.name for path in (folder / "checkpoint/step-00000004").iterdir()) == FILES
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_not_loaded_and_the_run_ends_as_if_nothing_had_happened(
    pools, whole, half, tmp_path, name, damage
):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    before, newest = (step_folder(run / "checkpoint", step) for step in (2, 4))
    do, of_a_file, of_the_manifest = DAMAGES[damage]
    do(newest / name, before / name)
    ranks = train(pools, SHARD, run, 6)
    assert [told.error for told in ranks] == ["", ""]
    said = [line for told in ranks for line in told.log if line.startswith("not used: ")]
    assert len(said) == 1 and f"{newest / name}: {of_the_manifest if name == manifest.FILE else of_a_file}" in said[0]
    assert [told.read for told in ranks] == [[str(before)], [str(before)]]
    assert resumed(run) == [0, 2]
    assert saved(run) == [*names(2, 4), "step-00000004.aside-1", *names(6)]
    assert_same(run, whole, 6)


def test_all_damaged_files_of_a_checkpoint_are_named_whichever_rank_has_read_them(pools, whole, half, tmp_path):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    newest = step_folder(run / "checkpoint", 4)
    flip(newest / "__0_0.distcp")
    (newest / "__1_0.distcp").unlink()
    (said,) = [line for line in train(pools, SHARD, run, 6)[0].log if line.startswith("not used: ")]
    assert f"{newest / '__0_0.distcp'}: {SUM}" in said and f"{newest / '__1_0.distcp'}: is missing" in said
    assert_same(run, whole, 6)


def test_where_every_checkpoint_is_damaged_all_are_named_and_nothing_is_touched(pools, half, tmp_path):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    for step in (2, 4):
        flip(step_folder(run / "checkpoint", step) / "__1_0.distcp")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ranks = train(pools, SHARD, run, 6)
    for told in ranks:
        assert "all 2 checkpoints are damaged" in told.error and "step-00000004/__1_0.distcp" in told.error
        assert "rename the folder to start anew" in told.error
    assert len([line for line in ranks[0].log if line.startswith("not used: ")]) == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_that_load_step_names_ends_the_run_and_no_other_is_taken(pools, half, tmp_path):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    flip(run / "checkpoint/step-00000002/__0_0.distcp")
    for told in train(pools, SHARD, run, 6, checkpoint={"load_step": 2}):
        assert f"{run / 'checkpoint/step-00000002/__0_0.distcp'}: {SUM}" in told.error
        assert told.read == []
    assert saved(run) == names(2, 4)


def test_load_step_goes_back_once_and_a_run_that_is_started_again_goes_on(pools, half, tmp_path):
    run, back = Path(shutil.copytree(half, tmp_path / "run")), {"load_step": 2}
    for steps, source in ((5, 2), (6, 5), (7, 6)):
        ranks = train(pools, SHARD, run, steps, checkpoint=back)
        assert [told.read for told in ranks] == [[str(step_folder(run / "checkpoint", source))]] * 2
    assert saved(run) == [*names(2, 4), "step-00000004.aside-1", *names(5, 6, 7)]
    train(pools, SHARD, run, 7, checkpoint={"load_step": 5})  # another step to go back to
    assert resumed(run) == [0, 2, 5, 6, 5]


# ------------------------------------------------------------------------------------------------- writing beside training


@pytest.mark.parametrize("degrees", [ONE, SHARD, TWO_BY_TWO], ids=["1 rank", "2 ranks", "4 ranks"])
def test_beside_training_the_same_is_stored_and_trained_although_the_tensors_change_at_once(pools, tmp_path, degrees):
    for mode in ("disabled", "async"):
        ranks = train(pools, degrees, tmp_path / mode, 6, ("slow",), checkpoint={"async_mode": mode})
        assert {told.error for told in ranks} == {""}
    for step in (2, 4, 6):
        assert_same(tmp_path / "async", tmp_path / "disabled", step)
    assert saved(tmp_path / "async") == names(2, 4, 6)


@pytest.mark.parametrize("degrees", [ONE, SHARD, TWO_BY_TWO], ids=["1 rank", "2 ranks", "4 ranks"])
def test_a_save_waits_for_the_one_before_and_stores_what_was_when_it_was_called(pools, tmp_path, degrees):
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:save_twice", degrees=degrees, folder=tmp_path / "checkpoint")
    assert ranks == [(["begin", "end", "begin", "end"], False)] * ranks_of(degrees)
    for step in (1, 2):
        for name, tensor in stored(tmp_path, step).items():
            assert torch.equal(tensor, torch.full_like(tensor, step)), name


def test_a_rank_with_nothing_to_write_is_no_fault(pools, tmp_path):
    pools[4].run(f"{HERE}:save_a_number", folder=tmp_path)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-00000001").glob("*.distcp")}
    assert len([size for size in sizes.values() if size > 0]) == 1
    assert_sound(tmp_path / "step-00000001")


# ----------------------------------------------------------------------------------------------------------- saves that fail


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (("no_write", 0), "the cable is out"),
        (("no_write", 1), "the cable is out"),
        (("no_commit",), "the cable is out"),
        (("wrong_on_disk", 0), "__0_0.distcp: is damaged: its checksum"),
        (("wrong_on_disk", 1), "__1_0.distcp: is damaged: its checksum"),
        (("wrong_metadata_on_disk",), ".metadata: is damaged: its checksum"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_save_that_fails_is_told_once_and_costs_that_checkpoint_only(pools, whole, tmp_path, trouble, cause, mode):
    ranks = train(pools, SHARD, tmp_path, 6, (*trouble, 4), checkpoint={"async_mode": mode})
    assert [told.error for told in ranks] == ["", ""]
    told = [line for rank in ranks for line in rank.log if "could not be saved" in line]
    assert len(told) == 1 and "step-00000004: could not be saved, with " in told[0] and cause in told[0]
    assert "\n" not in told[0]  # no traceback of DCP's
    assert saved(tmp_path) == names(2, 6)
    for step in (2, 6):
        assert_sound(step_folder(tmp_path / "checkpoint", step))
    assert_same(tmp_path, whole, 6)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_whose_last_save_fails_ends_with_that_on_every_rank(pools, tmp_path, mode):
    ranks = train(pools, SHARD, tmp_path, 6, ("no_write", 1, 6), checkpoint={"async_mode": mode})
    for told in ranks:
        assert "step-00000006: could not be saved, with" in told.error and "the cable is out" in told.error
    assert saved(tmp_path) == names(2, 4)
    assert_sound(tmp_path / "checkpoint/step-00000004")


def test_a_run_goes_on_from_the_checkpoint_before_one_that_failed(pools, whole, tmp_path):
    train(pools, SHARD, tmp_path, 4, ("no_write", 1, 4))
    assert train(pools, SHARD, tmp_path, 6)[0].error == ""
    assert resumed(tmp_path) == [0, 2]
    assert_same(tmp_path, whole, 6)


@contextmanager
def disk(place: Path, size: str) -> Iterator[Path]:
    """A disk of its own, of this size."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]).returncode:
        pytest.skip("this container lets nobody mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@root_on_linux
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_costs_no_checkpoint_and_the_next_save_succeeds_when_there_is_room(pools, whole, tmp_path, mode):
    """A checkpoint takes 1.8 MB: after the first one there is room for a half."""
    with disk(tmp_path / "disk", "12m") as place:
        ballast = place / "ballast"
        ballast.write_bytes(bytes(9_500_000))
        ranks = train(pools, SHARD, place, 6, ("full_disk_until_it_is_said", ballast), checkpoint={"async_mode": mode})
        assert [told.error for told in ranks] == ["", ""]
        (told,) = [line for line in ranks[0].log if "could not be saved" in line]
        assert "step-00000004: could not be saved, with 0.00 GiB free: " in told and "No space left on device" in told
        assert saved(place) == names(2, 6)
        for step in (2, 6):
            assert_sound(step_folder(place / "checkpoint", step))
        assert_same(place, whole, 6)


@root_on_linux
def test_a_run_that_ended_on_a_full_disk_goes_on_when_there_is_room(pools, whole, tmp_path):
    with disk(tmp_path / "disk", "3m") as place:
        for told in train(pools, SHARD, place, 6):
            assert "step-00000006: could not be saved, with" in told.error and "No space left on device" in told.error
        assert saved(place) == names(2)
        subprocess.run(["mount", "-o", "remount,size=30m", place], check=True)
        assert train(pools, SHARD, place, 6)[0].error == ""
        assert resumed(place) == [0, 2]
        assert_same(place, whole, 6)


# ---------------------------------------------------------------------------------- onto another mesh, and into another run


@pytest.mark.parametrize("flavor", ["tied", "uneven"])
def test_on_any_mesh_a_checkpoint_is_loaded_bit_for_bit(pools, tmp_path, flavor):
    """Rows that no two meshes split alike: 515 tokens over 1, 2 and 4 ranks."""
    before = tmp_path / "0"
    assert train(pools, SHARD, before, 2, flavor=flavor)[0].error == ""
    expected = stored(before, 2)
    for number, degrees in enumerate([ONE, {"tp": 2}, {"dp_replicate": 2}, TWO_BY_TWO, {"dp_shard": 4}, SHARD], 1):
        source, after = before / "checkpoint/step-00000002", tmp_path / str(number)
        config = run_config(degrees, after, 2, flavor=flavor)
        place = {"source": source, "folder": after / "checkpoint"}
        pools[ranks_of(degrees)].run(f"{HERE}:move", degrees=degrees, config=config, **place)
        found = stored(after, 2)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], degrees
        before = after


def shapes(flavor: str) -> dict[str, tuple[int, ...]]:
    model = load_family("tests.tiny", flavor).on_meta()
    return {f"model.{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("before", "now"), [("plain", "uneven"), ("plain", "deep"), ("deep", "plain"), ("plain", "tied")])
def test_every_tensor_that_does_not_fit_is_listed_with_what_is_wrong(pools, tmp_path, before, now):
    assert train(pools, SHARD, tmp_path / "before", 2, flavor=before)[0].error == ""
    source, had, has = tmp_path / "before/checkpoint/step-00000002", shapes(before), shapes(now)
    expected = {f"  {name}: not in the checkpoint" for name in has.keys() - had.keys()}
    expected |= {f"  {name}: in the checkpoint, not here" for name in had.keys() - has.keys()}
    expected |= {
        f"  {name}: {had[name]} in the checkpoint, {has[name]} here"
        for name in had.keys() & has.keys()
        if had[name] != has[name]
    }
    for told in train(pools, SHARD, tmp_path / "now", 2, flavor=now, checkpoint={"initial_load_path": str(source)}):
        first, *listed, last = told.error.splitlines()
        assert first == f"{source}: does not fit this run:" and "checkpoint.exclude_from_loading" in last
        assert set(listed) == expected and len(listed) == len(expected) > 0


def test_what_is_excluded_keeps_its_initial_value_and_all_else_is_loaded(pools, half, tmp_path):
    still = {"optimizer": {"lr": 1e-30}}  # a run that learns nothing
    start = {"initial_load_path": str(half / "checkpoint/step-00000004"), "exclude_from_loading": ["model.layers.1.*"]}
    assert train(pools, SHARD, tmp_path / "fresh", 2, **still)[0].error == ""
    assert train(pools, SHARD, tmp_path / "some", 2, checkpoint=start, **still)[0].error == ""
    fresh, learnt, found = stored(tmp_path / "fresh", 2), stored(half, 4), stored(tmp_path / "some", 2)
    for name in shapes("plain"):
        assert not torch.equal(learnt[name], fresh[name]), name
        expected = fresh if name.startswith("model.layers.1.") else learnt
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-12), name


def test_the_head_of_another_vocabulary_can_be_left_out(pools, half, tmp_path):
    start = {"initial_load_path": str(half / "checkpoint/step-00000004")}
    start |= {"exclude_from_loading": ["model.embed.*", "model.head.output.*"]}
    assert train(pools, SHARD, tmp_path, 2, flavor="uneven", checkpoint=start)[0].error == ""


@pytest.mark.parametrize("name", ["step-00000004.aside-1", "best so far"])
def test_a_checkpoint_under_a_name_of_the_users_own_can_be_begun_from(pools, half, tmp_path, name):
    source = str(shutil.copytree(half / "checkpoint/step-00000004", tmp_path / name))
    ranks = train(pools, SHARD, tmp_path / "run", 2, checkpoint={"initial_load_path": source})
    assert [told.error for told in ranks] == ["", ""]
    assert ranks[0].read == [source]


def test_a_checkpoint_under_the_name_of_another_step_is_refused(pools, half, tmp_path):
    source = str(shutil.copytree(half / "checkpoint/step-00000004", tmp_path / "step-00000005"))
    for told in train(pools, SHARD, tmp_path / "run", 6, checkpoint={"initial_load_path": source}):
        assert told.error == f"{source}/manifest.json: is damaged: it belongs to step 4"


@pytest.mark.parametrize("only", [True, False], ids=["weights alone", "a branch"])
@pytest.mark.parametrize("pattern", ["model.layer.*", "layers.*", ""])
def test_a_pattern_that_matches_no_tensor_is_refused(pools, half, tmp_path, pattern, only):
    start = {"initial_load_path": str(half / "checkpoint/step-00000004"), "initial_load_model_only": only}
    for told in train(pools, SHARD, tmp_path, 6, checkpoint=start | {"exclude_from_loading": ["model.head.*", pattern]}):
        assert f'checkpoint.exclude_from_loading: "{pattern}" matches no tensor of ' in told.error


def branch(source: Path, **keys: Any) -> dict[str, Any]:
    return {"initial_load_path": str(source), "initial_load_model_only": False, **keys}


def test_a_branch_goes_on_like_the_run_it_comes_from_and_then_on_its_own(pools, whole, half, tmp_path):
    original = Path(shutil.copytree(half, tmp_path / "original"))
    keys = branch(original / "checkpoint/step-00000004")
    assert train(pools, SHARD, tmp_path / "branch", 5, checkpoint=keys)[0].error == ""
    assert saved(tmp_path / "branch") == names(5)
    shutil.rmtree(original)  # the branch has a checkpoint of its own now
    ranks = train(pools, SHARD, tmp_path / "branch", 6, checkpoint=keys)
    assert [told.error for told in ranks] == ["", ""]
    assert [told.read for told in ranks] == [[str(tmp_path / "branch/checkpoint/step-00000005")]] * 2
    assert resumed(tmp_path / "branch") == [4, 5]
    assert losses(tmp_path / "branch") == losses(whole)[4:]
    ours, theirs = stored(tmp_path / "branch", 6), stored(whole, 6)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    here, there = (manifest.read(run / "checkpoint/step-00000006").numbers for run in (tmp_path / "branch", whole))
    assert [name for name in there if name != "config" and here[name] != there[name]] == []


def test_weights_alone_begin_at_step_zero_and_a_restart_does_not_load_them_again(pools, half, tmp_path):
    keys = {"initial_load_path": str(half / "checkpoint/step-00000004")}
    for steps in (2, 4):
        ranks = train(pools, SHARD, tmp_path / "parts", steps, checkpoint=keys)
    assert ranks[0].read == [str(tmp_path / "parts/checkpoint/step-00000002")]
    assert resumed(tmp_path / "parts") == [0, 2]
    train(pools, SHARD, tmp_path / "once", 4, checkpoint=keys)
    assert_same(tmp_path / "parts", tmp_path / "once", 4)


def test_exclusion_is_applied_once_and_the_run_that_used_it_resumes_with_everything(pools, whole, half, tmp_path):
    keys = branch(half / "checkpoint/step-00000004", exclude_from_loading=["optimizer.*"])
    for folder, *stops in (("once", 8), ("parts", 6, 8)):
        for steps in stops:
            assert train(pools, SHARD, tmp_path / folder, steps, checkpoint=keys)[0].error == ""
    assert resumed(tmp_path / "parts") == [4, 6]
    assert_same(tmp_path / "parts", tmp_path / "once", 8)
    assert losses(tmp_path / "once")[1] != losses(whole)[5]  # the moments were left out at first


def test_another_exclusion_than_that_of_the_checkpoint_is_applied(pools, half, tmp_path):
    for exclude in ([], ["optimizer.*"]):
        run = Path(shutil.copytree(half, tmp_path / f"run {len(exclude)}"))
        assert train(pools, SHARD, run, 6, checkpoint={"exclude_from_loading": exclude})[0].error == ""
    assert losses(tmp_path / "run 0")[4] == losses(tmp_path / "run 1")[4]
    assert losses(tmp_path / "run 0")[5] != losses(tmp_path / "run 1")[5]


# -------------------------------------------------------------------------------------------------------- trying a folder out


def test_a_folder_that_not_all_ranks_share_is_refused_by_all_ranks(pools, tmp_path):
    """As where job.dump_folder is on a disk of each machine's own."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    assert pools[2].run(f"{HERE}:try_folder", folders=[shared, shared]) == ["", ""]
    assert list(shared.iterdir()) == []
    for fault in pools[2].run(f"{HERE}:try_folder", folders=[shared, own]):
        assert f"{own}: rank 1 does not see what rank 0 writes there" in fault
    own.mkdir()
    (own / ".probe").write_text("left by another run")
    for fault in pools[2].run(f"{HERE}:try_folder", folders=[shared, own]):
        assert "rank 1 does not see" in fault
    assert list(shared.iterdir()) == []
