"""Writing checkpoints, while training waits or goes on."""

import datetime
import functools
import logging
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, retire, step_folder, unfinished_folder
from titanlite.checkpoint.manifest import Contents, Manifest
from titanlite.checkpoint.storage import Writer
from titanlite.config.schema import Checkpoint as Keys
from titanlite.errors import UserError
from titanlite.files import sync
from titanlite.transforms.shards import local_part

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks make one, and call its methods, together.

    A save that fails leaves what was there before; it is reported, kept in `failure` until another one succeeds, and the next
    one is tried as ever.
    """

    def __init__(self, folder: Path, keys: Keys, timeout_seconds: int):
        self.failure = ""
        # Of its own, since collectives of the background thread must not mix with those of training; gloo, since all is in the
        # CPU's memory; and with a patience of its own, since writing takes longer than a step.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        self._folder, self._keys = folder, keys
        self._stager = _Stager(pinned=keys.async_mode == "async_with_pinned_mem") if keys.async_mode != "disabled" else None
        self._pending: tuple[int, float, Future] | None = None  # step, time of its start, what it will come to

    def save(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Writes the checkpoint of a step; returns once the tensors may change. A save that is still going on is waited for."""
        self.wait()
        name = step_folder(self._folder, step).name
        commit = functools.partial(self._commit, step, {"step": step, **numbers})
        writer = Writer(unfinished_folder(self._folder, step), name, commit, staged=self._stager is not None)
        begin = time.perf_counter()
        if self._stager is None:
            done: Future = Future()
            try:
                done.set_result(dcp.save(tensors, storage_writer=writer, process_group=self.group))
            except (CheckpointException, OSError) as error:
                done.set_exception(error)
        else:
            done = dcp.async_save(tensors, storage_writer=writer, process_group=self.group, async_stager=self._stager)
        self._pending = (step, begin, done)
        self.poll()

    def poll(self) -> None:
        """Reports a save that has come to an end; waits for none."""
        if self._pending and self._pending[2].done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save that is going on, if there is one, and reports it."""
        if self._pending is None:
            return
        (step, begin, done), self._pending = self._pending, None
        final = step_folder(self._folder, step)
        try:
            done.result()
        except (CheckpointException, OSError) as error:
            self.failure = f"{final}: could not be saved{_free_space(self._folder)}: {_cause(error)}"
            if dist.get_rank() == 0:
                log.error("%s", self.failure)
                shutil.rmtree(unfinished_folder(self._folder, step), ignore_errors=True)
            return
        self.failure = ""
        log.info("saved %s in %.2f s", final, time.perf_counter() - begin)

    def newest(self) -> int | None:
        """The step of the newest checkpoint that there is, after a save that is going on; None where there is none."""
        self.wait()
        steps = [list_steps(self._folder)]
        dist.broadcast_object_list(steps)  # of rank 0, which commits
        return steps[0][-1] if steps[0] else None

    def finish(self) -> None:
        """Waits for the last save. Raises UserError if it has failed."""
        self.wait()
        if self.failure:
            raise UserError(self.failure)

    def _commit(self, step: int, numbers: dict[str, Any], files: dict[str, Contents]) -> None:
        """Makes a written checkpoint one that exists; on rank 0, when all ranks have written and read back their files."""
        unfinished, final = unfinished_folder(self._folder, step), step_folder(self._folder, step)
        manifest.write(unfinished, Manifest(numbers, files))
        sync(unfinished)
        unfinished.rename(final)  # a folder of that name is never there: see folder.clean_up
        sync(self._folder)
        retire(self._folder, self._keys)


class _Stager(AsyncStager):
    """Copies tensors into the CPU's memory, always the same, so that only the first copy waits for the system to provide it.

    DCP's DefaultStager takes 2.8 times as long on a CPU, and fails for DTensors in PyTorch 2.11.
    """

    _synchronize_after_execute = False

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._copies:
            self._copies = {name: self._room(tensor) for name, tensor in tensors.items()}
        assert self._copies.keys() == tensors.keys()
        sources = [local_part(tensor) for tensor in tensors.values()]
        torch._foreach_copy_([local_part(copy) for copy in self._copies.values()], sources, non_blocking=self._pinned)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copies

    def _room(self, tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        room = torch.empty(local.shape, dtype=local.dtype, pin_memory=self._pinned)
        # The constructor: from_local would move the copy to the device of the mesh.
        return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room


def _free_space(folder: Path) -> str:
    """How much there is on a disk, which is the usual cause; nothing where not even that can be told."""
    try:
        return f", with {shutil.disk_usage(folder).free / 2**30:.2f} GiB free"
    except OSError:
        return ""


def _cause(error: Exception) -> str:
    """The last line of what a rank has met, without DCP's traceback around it."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
