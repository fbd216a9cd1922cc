"""Runs with checkpoints and planted failures: what the ranks of a pool run, and what tests check."""

import errno
import gc
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, full_run, mesh_of
from tests.distributed.test_resume import Degrees, reports, run_config, same_tensors
from titanlite.checkpoint import load, manifest, save
from titanlite.checkpoint.folder import check_shared
from titanlite.checkpoint.save import Saver
from titanlite.checkpoint.storage import METADATA, Writer
from titanlite.config.operation import Checkpoint
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.resume import of_other_stages
from titanlite.loop.step import build_model
from titanlite.optim.build import build_optimizer
from titanlite.optim.state import run_tensors
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import family_of

HERE = "tests.distributed.checkpoint_runs"
SHARD = {"dp_shard": 2}
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]


# ------------------------------------------------------------------------------------------------------ what the ranks run


class Outcome(NamedTuple):
    """The messages of a rank's run, and the checkpoints from which it has read tensors."""

    log: list[str]
    error: str  # the UserError that ended the run, or nothing
    read: list[str]


def attempt(degrees: Degrees, config: Config, trouble: tuple = ()) -> Outcome:
    """A whole run, with a failure of one kind."""
    log: list[str] = []
    read: list[str] = []
    error, real = "", dcp.load

    def recorded(tensors: dict[str, Tensor], storage_reader: Any) -> None:
        read.append(str(storage_reader.path))
        real(tensors, storage_reader=storage_reader)

    logger, handler = logging.getLogger("titanlite"), logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)  # unlike `logger.level`, also where an earlier test of this process has set another
    try:
        with TROUBLE[trouble[0]](*trouble[1:]) if trouble else nullcontext(), patch.object(load.dcp, "load", recorded):
            full_run(degrees, config)
    except UserError as raised:
        error = str(raised)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        gc.enable()  # a run that ends with an error leaves it disabled
    dist.barrier()
    return Outcome(log, error, read)


@contextmanager
def slow() -> Iterator[None]:
    """Delays writing until training has changed the tensors."""
    real, waiting = Writer.write_data, threading.Event()

    def late(self: Writer, *words: Any) -> Any:
        waiting.wait(0.3)
        return real(self, *words)

    with patch.object(Writer, "write_data", late):
        yield


@contextmanager
def harmed(writer: type[FileSystemWriter], method: str, step: int, harm: Callable[[Path], object]) -> Iterator[None]:
    """Damages one checkpoint's folder right after a method of its writer."""
    real = getattr(writer, method)

    def failing(self: FileSystemWriter, *words: Any) -> Any:
        result = real(self, *words)
        if f"step-{step:08d}" in str(self.path):
            harm(Path(self.path))
        return result

    with patch.object(writer, method, failing):
        yield


def no_write(rank: int, step: int) -> AbstractContextManager[None]:
    """One rank cannot completely write its part of one checkpoint."""
    return harmed(Writer, "write_data", step, lambda _: unplug() if dist.get_rank() == rank else None)


def unplug() -> None:
    raise OSError(errno.EIO, "the cable is out")


@contextmanager
def no_commit(step: int) -> Iterator[None]:
    """All ranks have written, but the manifest cannot be written."""
    real = manifest.write

    def failing(folder: Path, contents: manifest.Manifest) -> None:
        real(folder, contents)
        if f"step-{step:08d}" in folder.name:
            unplug()

    with patch.object(save.manifest, "write", failing):
        yield


def wrong_on_disk(rank: int, step: int) -> AbstractContextManager[None]:
    """A rank's disk stores other bytes than those written."""

    def harm(folder: Path) -> None:
        if dist.get_rank() == rank:
            flip(next(folder.glob(f"__{rank}_*")))

    return harmed(FileSystemWriter, "write_data", step, harm)


def wrong_metadata_on_disk(step: int) -> AbstractContextManager[None]:
    """As `wrong_on_disk`, for the metadata, which rank 0 writes."""
    return harmed(FileSystemWriter, "finish", step, lambda folder: flip(folder / METADATA))


@contextmanager
def full_disk_until_it_is_said(ballast: Path) -> Iterator[None]:
    """Frees the full disk as soon as the log reports it."""

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
    """Tensors of all kinds in a run, filled with one value."""
    mesh = mesh_of(degrees)
    shardings = [[Replicate()] * mesh.ndim, [*([Replicate()] * (mesh.ndim - 1)), Shard(0)]]
    shardings += [[*([Replicate()] * (mesh.ndim - 2)), Shard(0), Shard(1)]] if mesh.ndim > 1 else []
    tensors = {f"sharded.{n}": distribute_tensor(torch.full((7, 5), value), mesh, s) for n, s in enumerate(shardings)}
    plain = {"matrix": torch.full((3, 4), value), "half": torch.full((3,), value, dtype=torch.bfloat16)}
    return tensors | plain | {"count": torch.tensor(int(value), dtype=torch.int32), "scale": torch.tensor(value)}


def save_at_once(folder: Path) -> bool:
    """Whether a synchronous save is complete and reported when `save` returns."""
    saver = Saver(folder, Checkpoint(enable=True, async_mode="disabled"), 60)
    saver.save(1, sample_tensors({}, 1.0), numbers())
    return saver._pending is None


def save_twice(degrees: Degrees, folder: Path) -> tuple[list[str], bool]:
    """Two asynchronous saves, the first of which is slow; the order of events, and whether `save` waited for the first one."""
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
        for tensor in tensors.values():  # as the next optimizer step would
            tensor.mul_(2)
        threading.Timer(0.3, free.set).start()
        saver.save(2, tensors, numbers())
        for tensor in tensors.values():
            tensor.zero_()
        saver.finish()
    dist.barrier()
    return events, waited


def save_a_number(folder: Path) -> None:
    """Two saves, in which only one rank has something to write; the second one replaces the first."""
    saver = Saver(folder, Checkpoint(enable=True, keep_latest_k=1), 60)
    for step in (1, 2):
        saver.save(step, {"scale": torch.tensor(2.0)}, numbers())
    saver.finish()
    found = {"scale": torch.tensor(0.0)}
    load.load_tensors(folder / "step-00000002", load.verified(folder / "step-00000002"), found)
    assert found["scale"] == 2.0


def move(degrees: Degrees, config: Config, source: Path, folder: Path) -> None:
    """Loads a checkpoint onto a mesh, and saves it from there."""
    model = build_model(family_of(config.model), config, mesh_of(degrees), CPU)
    optimizer = build_optimizer(model, config.optimizer)
    tensors, found = run_tensors(model, optimizer, None), load.verified(source)
    load.load_tensors(source, found, tensors, elsewhere=of_other_stages(model, tensors))
    saver = Saver(folder, Checkpoint(enable=True), 60)
    saver.save(found.numbers["step"], tensors, numbers())
    saver.finish()
    dist.barrier()


def numbers() -> dict[str, Any]:
    """The required entries of a manifest besides the step."""
    return {"samples": 8, "global_batch": 8, "data": {}, "config": {}, "architecture": {}}


def try_folder(folders: list[Path]) -> str:
    """The fault of a folder that is a different one on each rank."""
    try:
        check_shared(folders[dist.get_rank()])
    except UserError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------------------ what they share


def train(pools: dict[int, Pool], degrees: Degrees, folder: Path, steps: int, trouble: tuple = (), **sections) -> list[Outcome]:
    """Trains this many steps with a checkpoint every second step, all of which are kept; -> the outcome of each rank."""
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
    """The step at which each start of a run began."""
    return [start["resumed_step"] for start in json.loads((folder / "provenance.json").read_text())]


def assert_same(found: Path, expected: Path, step: int) -> None:
    """Asserts that two runs are equal bit for bit."""
    assert losses(found) == losses(expected)
    same_tensors(found, expected, step)


def assert_sound(source: Path) -> None:
    assert list(load.faults(source, manifest.read(source))) == []


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
