"""Saves checkpoints, synchronously or while training continues."""

import datetime
import functools
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, retire, step_folder
from titanlite.checkpoint.manifest import FileDigest, Manifest
from titanlite.checkpoint.pinned import pinned_like
from titanlite.checkpoint.storage import Writer
from titanlite.config.operation import Checkpoint
from titanlite.ground.errors import UserError
from titanlite.ground.files import unfinished_path
from titanlite.ground.torch_private import foreach_copy_, like
from titanlite.launch.process import of_first_rank
from titanlite.transforms.shards import local_part

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks create it, and call its methods, together.

    A failed save leaves earlier checkpoints intact. It is logged, and `failure` describes it until a later save succeeds.
    """

    def __init__(self, folder: Path, cfg: Checkpoint, timeout_seconds: int):
        self.failure = ""
        # A separate group, because collectives of the background thread must not mix with those of training. gloo, because the
        # tensors are in CPU memory. A separate timeout, because writing takes longer than a step.
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self._folder, self._cfg = folder, cfg
        self._stager = _Stager(pinned=cfg.async_mode == "async_with_pinned_mem") if cfg.async_mode != "disabled" else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, float, Future] | None = None  # step, start time, result

    def save(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> bool:
        """Writes the checkpoint of a step, after any pending save. Returns when the tensors may change: False if it has failed,
        which an asynchronous one shows later."""
        self.wait()
        final = step_folder(self._folder, step)
        unfinished = unfinished_path(final)

        def commit(files: dict[str, FileDigest]) -> None:
            """Gives the checkpoint its final name, which no folder has (see folder.clean_up)."""
            manifest.commit(unfinished, final, Manifest({"step": step, **numbers}, files))
            retire(self._folder, self._cfg, numbers.get("run", ""))

        writer = Writer(unfinished, final.name, commit, staged=self._stager is not None)
        write = functools.partial(dcp.save, storage_writer=writer, process_group=self.group)
        begin = time.perf_counter()
        if self._stager is not None:
            self._pending = step, begin, self._thread.submit(write, self._stager.stage(tensors))
            return True
        plain = {name: _plain(tensor) for name, tensor in tensors.items()}
        self._report(step, begin, functools.partial(write, plain))
        return not self.failure

    def poll(self) -> None:
        """Reports a save if it has ended; does not wait."""
        if self._pending and self._pending[2].done():
            self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the pending save, if any, and reports it; as failed after so many seconds."""
        if self._pending is not None:
            (step, begin, done), self._pending = self._pending, None
            self._report(step, begin, functools.partial(done.result, seconds))

    def _report(self, step: int, begin: float, write: Callable[[], object]) -> None:
        """Logs whether `write`, which returns when a save that began at `begin` has ended, saved the checkpoint of a step."""
        final = step_folder(self._folder, step)
        try:
            write()
        except (CheckpointException, OSError) as error:
            self.failure = f"{final}: could not be saved: {cause(error)}"
            if dist.get_rank() == 0:
                log.error("%s", self.failure)
                shutil.rmtree(unfinished_path(final), ignore_errors=True)
            return
        self.failure = ""
        log.info("saved %s in %.2f s", final, time.perf_counter() - begin)

    def newest(self) -> int | None:
        """The step of the newest checkpoint, after any pending save; None if there is none."""
        self.wait()
        steps = of_first_rank(list_steps(self._folder))  # which commits
        return steps[-1] if steps else None

    def finish(self) -> None:
        """Waits for the last save. Raises UserError if it failed."""
        self.wait()
        if self.failure:
            raise UserError(self.failure)


class _Stager:
    """Copies tensors to CPU memory that is allocated once, because allocation is slow.

    DCP's DefaultStager takes 2.8 times as long on a CPU, and fails for DTensors in PyTorch 2.11.
    """

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._copies:
            self._copies = self._empty_copies(tensors)
        assert self._copies.keys() == tensors.keys()
        sources = [local_part(tensor) for tensor in tensors.values()]
        foreach_copy_([local_part(copy) for copy in self._copies.values()], sources, non_blocking=self._pinned)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copies

    def _empty_copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = [local_part(tensor) for tensor in tensors.values()]
        copies = pinned_like(parts) if self._pinned else [torch.empty(part.shape, dtype=part.dtype) for part in parts]
        return {
            name: like(tensor, copy) if isinstance(tensor, DTensor) else copy
            for (name, tensor), copy in zip(tensors.items(), copies, strict=True)
        }


def _plain(tensor: Tensor) -> Tensor:
    """Without the class that float8's gather gives to shards, which only a program with torchao reads; shares its memory."""
    part: Any = local_part(tensor)
    if not hasattr(part, "__tensor_flatten__"):
        return tensor
    inner = getattr(part, part.__tensor_flatten__()[0][0])
    return like(tensor, inner) if isinstance(tensor, DTensor) else inner


def cause(error: BaseException) -> str:
    """The last line of an error, without DCP's traceback."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
