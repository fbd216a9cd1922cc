"""Each rank's part of the global batches, read by this process or ahead of it by others.

The position in the data is one number: samples consumed so far. So there is no state to save, whatever reads ahead.
"""

import itertools
import logging
import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.schema import Config, Dataloader
from titanlite.data.batch import Batch
from titanlite.data.mixture import Data
from titanlite.data.samples import Arrays
from titanlite.errors import UserError
from titanlite.launch import children

log = logging.getLogger(__name__)

_LOCATED_AT_ONCE = 4096  # samples whose places are worked out together: numpy's overhead a call is shared by so many


def to_batch(arrays: Arrays, local_batch: int) -> Batch:
    """Rows as the model gets them, in microbatches of `local_batch`."""
    return Batch(*(None if a is None else torch.from_numpy(a).view(-1, local_batch, a.shape[1]) for a in arrays))


def read_batches(
    config: Config, data: Data, consumed: int, global_batch: int, part: tuple[int, int], pin_memory: bool = False
) -> "Batches":
    """This rank's part of the global batches that follow `consumed` samples; part: (data rank, data degree)."""
    keys, training = config.dataloader, config.training
    ahead = keys.workers * keys.prefetch
    return Batches(Plan(data, consumed, global_batch, training.local_batch_size, training.seed, part, ahead), keys, pin_memory)


class Plan:
    """Which samples make up this rank's part of each step, step 0 being the next one."""

    def __init__(
        self,
        data: Data,
        consumed: int,
        global_batch: int,
        local_batch: int,
        seed: int,
        part: tuple[int, int],
        ahead: int = 0,
    ):
        """consumed: samples that earlier steps have used; the next one uses `consumed` .. `consumed + global_batch - 1`.

        part: (data rank, data degree); each rank takes a run of neighbouring samples. ahead: steps that are read before they
        are needed, at most.
        """
        rank, degree = part
        self.data, self.seed, self.local_batch, self.global_batch = data, seed, local_batch, global_batch
        self.share = global_batch // degree
        assert self.share * degree == global_batch and self.share % local_batch == 0
        self.first = consumed + rank * self.share
        self.steps = max(1, _LOCATED_AT_ONCE // self.share)
        # of each step that is being read, its number and the row that was begun last
        self.latest = torch.full((ahead + 1, 2), -1).share_memory_()
        self._notes: np.ndarray | None = None  # the same memory, as the process that reads sees it
        self._block, self._located = -1, (np.zeros(0), np.zeros(0))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_notes": None}

    def __getitem__(self, step: int) -> Batch | UserError:
        """This rank's part of a step, (microbatches, local_batch, ...); a fault of the data is handed on, not raised.

        The loader would wrap it into the traceback of a worker process.
        """
        sources, samples = self.located(step)
        if self._notes is None:
            self._notes = self.latest.numpy()
        note = self._notes[step % len(self._notes)]
        note[0], note[1] = step, -1
        try:
            return to_batch(self.data.read(sources, samples, note[1:]), self.local_batch)
        except UserError as error:
            return error

    def located(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample of it) of each sample of this rank's part of a step, (share,) int64 each."""
        block, inside = divmod(step, self.steps)
        if block != self._block:
            steps = np.arange(block * self.steps, (block + 1) * self.steps)
            positions = self.first + steps[:, None] * self.global_batch + np.arange(self.share)
            self._located = self.data.locate(positions.ravel(), self.seed)
            self._block = block
        here = slice(inside * self.share, (inside + 1) * self.share)
        return self._located[0][here], self._located[1][here]

    def last_read(self, step: int) -> str:
        """What of a step was being read last, for a person."""
        noted, at = self.latest[step % len(self.latest)].tolist()
        if noted != step or at < 0:
            return "no worker has begun to read it"
        sources, samples = self.located(step)
        mixed = self.data.sources[sources[at]]
        rows, row = mixed.locate(int(samples[at]))
        return f'source "{mixed.source.name}", {rows.file.prefix}.bin, sample {row}'


class Batches:
    """Endlessly, one step after the other, this rank's part of the global batch. `close` ends what reads ahead."""

    def __init__(self, plan: Plan, keys: Dataloader, pin_memory: bool):
        """pin_memory: batches are put into page-locked memory, from where a GPU copies by itself."""
        self._plan, self._step = plan, 0
        self._pin = pin_memory and not keys.workers  # the loader does it itself, in a thread
        self._waiting = _Waiting(plan, keys.stall_seconds)
        self._source = _read_ahead(plan, keys, pin_memory) if keys.workers else map(plan.__getitem__, itertools.count())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._waiting.since = time.monotonic(), self._step
        try:
            batch = next(self._source)
        except (ConnectionError, EOFError, FileNotFoundError) as error:  # a batch whose memory went with its worker
            raise RuntimeError("a worker that reads data has ended; it may have been killed for want of memory") from error
        self._waiting.since = None
        if isinstance(batch, UserError):
            raise batch
        self._step += 1
        return batch.pin_memory() if self._pin else batch

    def close(self) -> None:
        """Ends the workers, which go with the last reference to the loader's iterator."""
        self._waiting.close()
        self._source = iter(())

    __del__ = close


class OnDevice:
    """Batches on the device that works on them; the next one is read and copied while it works on the last."""

    def __init__(self, batches: Batches, device: torch.device):
        self._batches, self._device = batches, device
        # Copies on the stream of the computation would wait for all of it, and it for them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Batch | Exception | None = None

    def prepare(self) -> None:
        """Reads the next batch and begins to copy it, when a step's work has been launched; what fails is told by `take`."""
        assert self._next is None
        try:
            batch = next(self._batches)
            with torch.cuda.stream(self._stream):  # of None, nothing
                self._next = batch.to(self._device, non_blocking=True)
        except Exception as error:
            self._next = error  # the step before is whole, and may yet be saved

    def take(self) -> Batch:
        """The next batch, prepared or not."""
        if self._next is None:
            self.prepare()
        batch, self._next = self._next, None
        if isinstance(batch, Exception):
            raise batch
        if self._stream is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._stream)
            batch.record_stream(now)
        return batch

    def close(self) -> None:
        """Ends what reads ahead."""
        self._batches.close()


def _read_ahead(plan: Plan, keys: Dataloader, pin_memory: bool) -> Iterator[Batch | UserError]:
    """Steps read by worker processes, in order; RuntimeError where one of them dies."""
    multiprocessing.set_forkserver_preload([__name__])
    with children.starting({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # PyTorch's to torchdata
        return iter(
            StatefulDataLoader(
                plan,
                batch_size=None,
                sampler=itertools.count(),
                num_workers=keys.workers,
                prefetch_factor=keys.prefetch,
                pin_memory=pin_memory,
                # A fork of this process would copy CUDA's and gloo's threads in the middle of their work; these are forks of a
                # server that has only imported what they need.
                multiprocessing_context="forkserver",
                worker_init_fn=_start_worker,
                snapshot_every_n_steps=2**62,  # its state is not asked for: ours is one number
            )
        )


def _start_worker(_number: int) -> None:
    children.end_with_starter()


class _Waiting:
    """Says what is being read when a step's data is waited for longer than `patience` seconds, and again after as long."""

    def __init__(self, plan: Plan, patience: float):
        self._plan, self._patience = plan, patience
        self.since: tuple[float, int] | None = None  # when the waiting began, and for which step
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="data watch").start()

    def close(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        told = 0.0
        while not self._done.wait(min(1.0, self._patience / 4)):
            now, since = time.monotonic(), self.since
            if since is None or now - max(since[0], told) < self._patience:
                continue
            told = now
            log.warning("waiting for data for %.0f s: %s", now - since[0], self._plan.last_read(since[1]))
