"""Each rank's part of the global batches, read by this process or ahead of it by worker processes.

Which samples a step has follows from the timeline of the run (timeline.py). There is no other state to save, also with workers.
"""

import itertools
import logging
import multiprocessing
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import connection, queues
from multiprocessing.context import BaseContext

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.schema import Config
from titanlite.data.batch import Batch, to_batch
from titanlite.data.mixture import Data
from titanlite.data.stream import Position, StreamDataset, StreamStep
from titanlite.data.timeline import Timeline
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import end_reading
from titanlite.launch import children

log = logging.getLogger(__name__)

_UNNOTICED = 10.0  # seconds; the loader looks for dead workers every five, except in the middle of a message
_LOCATED_AT_ONCE = 4096  # samples that are located together, to share NumPy's overhead per call


class StepDataset(Dataset[Batch | UserError]):
    """A map-style dataset: this rank's part of the global batches of a run. Entry 0 is that of `first_step`."""

    def __init__(
        self, config: Config, data: Data, part: tuple[int, int], timeline: Timeline | None = None, first_step: int = 1
    ):
        """part: (data rank, data degree); each rank takes a run of neighboring samples.

        timeline: of the run; None: a new run. From `first_step` on it has one global batch, and the mixture of `data`.
        """
        rank, degree = part
        if data.stream:
            raise data.stream.fault("is a stream, whose samples have no numbers; only a run reads it")
        self.data, self.first_step, self.timeline = data, first_step, timeline or data.timeline(config.global_batch(degree))
        global_batch = self.timeline.at(first_step)[0].global_batch
        self.share = global_batch // degree
        self.cfg, self.seed, self.local_batch = config.dataloader, config.training.seed, config.training.local_batch_size
        assert self.share * degree == global_batch and self.share % self.local_batch == 0
        self.positions = rank * self.share + np.arange(self.share)  # in each global batch
        self.steps = max(1, _LOCATED_AT_ONCE // self.share)
        # for each step that may be read at once, its number and the row that was begun last
        ahead = self.cfg.workers * self.cfg.prefetch
        self.latest = torch.full((ahead + 1, 2), -1).share_memory_()
        self._block, self._located = -1, (np.zeros(0), np.zeros(0))

    def __iter__(self) -> Iterator[Batch | UserError]:
        return map(self.__getitem__, itertools.count())

    def __getitem__(self, step: int) -> Batch | UserError:
        """This rank's part of a step, (microbatches, local_batch, ...), or the fault in the data.

        The fault is returned, not raised, since the loader would wrap it in the traceback of a worker process.
        """
        sources, samples = self.located(step)
        note = self.latest[step % len(self.latest)].numpy()
        note[:] = step, -1
        try:
            return to_batch(self.data.read(sources, samples, note[1:]), self.local_batch)
        except UserError as error:
            return error

    def located(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample of it) of each sample of this rank's part of a step, (share,) int64 each."""
        block, inside = divmod(step, self.steps)
        if block != self._block:
            begin = self.first_step + block * self.steps
            firsts = np.array([self.timeline.at(number)[1] for number in range(begin, begin + self.steps)])
            segment, _ = self.timeline.at(begin)
            self._located = self.data.locate((firsts[:, None] + self.positions).ravel(), self.seed, segment)
            self._block = block
        here = slice(inside * self.share, (inside + 1) * self.share)
        return self._located[0][here], self._located[1][here]

    def read_by_workers(self, step: int) -> str:
        """What workers have read last, of a step and of those ahead of it, for a message."""
        return "; ".join(dict.fromkeys(self.last_read(ahead) for ahead in range(step, step + len(self.latest))))

    def last_read(self, step: int) -> str:
        """The source, file and sample of a step that was being read last, for a message."""
        noted, at = self.latest[step % len(self.latest)].tolist()
        if noted != step or at < 0:
            return "no worker has begun to read it"
        sources, samples = self.located(step)
        source = self.data.sources[sources[at]]
        return f'source "{source.name}", {source.where(int(samples[at]))}'


Steps = StepDataset | StreamDataset


def steps_of(
    config: Config, data: Data, part: tuple[int, int], timeline: Timeline, first_step: int, at: Position | None = None
) -> Steps:
    """This rank's part of the global batches of a run from a step on. at: where a stream is; None: at its beginning.

    Raises UserError for the states of a stream of another data degree.
    """
    if data.stream:
        return StreamDataset(config, data.stream, part, timeline, first_step, at)
    return StepDataset(config, data, part, timeline, first_step)


class Batches(Iterator[Batch]):
    """This rank's part of every global batch, step by step, without end, on the training device. `close` ends the workers.

    `prepare` reads the next batch and copies it while the device computes the current step. state: of a stream after the last
    batch, as JSON.
    """

    def __init__(self, dataset: Steps, device: torch.device | str = "cpu"):
        self._dataset, cfg = dataset, dataset.cfg
        self._device = torch.device(device)
        # On the stream of the computation, the copies would wait for all of it, and it for them.
        self._stream = torch.cuda.Stream(device) if self._device.type == "cuda" else None
        before, self._workers = multiprocessing.active_children(), list[multiprocessing.process.BaseProcess]()
        self._watch = _StallWatch(dataset, cfg.stall_seconds, self._end_if_a_worker_has_died)
        self._watch.waiting = time.monotonic(), 0  # for workers to start
        self._source: Iterator[Batch | UserError | StreamStep] = _read_ahead(dataset) if cfg.workers else iter(dataset)
        self._watch.waiting = None
        self._workers = [process for process in multiprocessing.active_children() if process not in before]
        self._step, self.state, self._state_ahead = 0, "", ""
        self._next: Batch | Exception | None = None
        self._waited = 0.0  # seconds, on a CPU
        # on a GPU, of each batch: when the step before was done, and when the batch was there
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def prepare(self) -> None:
        """Reads the next batch and starts its copy, once a step's work has been launched; `next` raises what fails here."""
        assert self._next is None
        begin, done = time.perf_counter(), self._mark(None if self._stream is None else torch.cuda.current_stream(self._device))
        try:
            self._next = self._read()
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    self._next = self._next.to(self._device, non_blocking=True)
        except Exception as error:
            self._next = error  # the step before is complete and can still be saved
        ready = self._mark(self._stream)
        if done is None or ready is None:
            self._waited += time.perf_counter() - begin
        else:
            self._events.append((done, ready))

    @staticmethod
    def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """The time at which a stream reaches this point; None without a stream."""
        if stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def waited(self) -> float:
        """Seconds since the last call in which the device had nothing to do, because a batch was not there yet; a host sync."""
        seconds, self._waited = self._waited, 0.0
        for done, ready in self._events:
            ready.synchronize()
            done.synchronize()
            seconds += max(0.0, done.elapsed_time(ready) / 1000)
        self._events = []
        return seconds

    def __next__(self) -> Batch:
        """The next batch, prepared or not."""
        if self._next is None:
            self.prepare()
        batch, self._next, self.state = self._next, None, self._state_ahead
        if isinstance(batch, Exception):
            raise batch
        assert batch is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            batch.record_stream(current)
        return batch

    def _read(self) -> Batch:
        self._watch.waiting = time.monotonic(), self._step
        try:
            found = next(self._source)
            batch, self._state_ahead = found if isinstance(found, StreamStep) else (found, "")
        # a worker that was killed, or a batch whose shared memory ended with it
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
                raise
            self._end_if_a_worker_has_died()
            read = self._dataset.read_by_workers(self._step)
            why = "its memory or that of /dev/shm ran out (docker run --shm-size), or a file that it read was truncated"
            raise RuntimeError(
                f"a data worker has ended, perhaps because {why} or could no longer be read; read last: {read}"
            ) from error
        finally:
            self._watch.waiting = None
        if isinstance(batch, UserError):
            raise batch
        self._step += 1
        return batch if self._stream is None else batch.pin_memory()  # from where a GPU copies asynchronously

    def close(self) -> None:
        """Ends the workers, which end with the last reference to the loader's iterator."""
        self._watch.done.set()
        self._end_if_a_worker_has_died()
        self._workers, self._source = [], iter(())

    __del__ = close

    def _end_if_a_worker_has_died(self) -> None:
        """Ends the others, which may wait for a queue's lock that it held, and reading, which may wait for the rest of its
        message.
        """
        if not connection.wait([worker.sentinel for worker in self._workers], 0):
            return
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        end_reading(self._source)


def _read_ahead(dataset: Steps) -> Iterator[Batch | UserError | StreamStep]:
    """Steps read by worker processes, in order; RuntimeError where one of them dies.

    Raises UserError as `naming_long_folder` does.
    """
    multiprocessing.set_forkserver_preload([__name__])
    with warnings.catch_warnings():  # torchdata 0.11 calls torch.set_vital, which torch 2.13 calls deprecated
        warnings.filterwarnings("ignore", category=UserWarning, module="torchdata")
        loader = StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=itertools.count() if isinstance(dataset, StepDataset) else None,
            num_workers=dataset.cfg.workers,
            prefetch_factor=dataset.cfg.prefetch,
            # A fork of this process would copy the threads of CUDA and gloo in an arbitrary state. The fork server has only
            # imported what the workers need.
            multiprocessing_context=_context(),
            worker_init_fn=_start_worker,
            snapshot_every_n_steps=None,  # the position is a number, and the state of a stream comes with each of its steps
        )
    with children.starting(children.TO_ALL), children.naming_long_folder():
        return iter(loader)


class _Flag:
    """An Event for the loader to set, without a lock.

    A worker takes the lock of multiprocessing's Event for each step. Killed with it, it never gives it back, and the loader,
    which takes it before it says that a worker has died, waits forever.
    """

    def __init__(self) -> None:
        self._set = torch.zeros((), dtype=torch.bool).share_memory_()

    def set(self) -> None:
        self._set.fill_(True)

    def is_set(self) -> bool:
        return bool(self._set)


def _context() -> BaseContext:
    class ForkServer(type(multiprocessing.get_context("forkserver"))):  # type: ignore[misc]  # not on every system
        def Event(self) -> _Flag:  # multiprocessing's name
            return _Flag()

    return ForkServer()


def _start_worker(number: int) -> None:
    children.name_process(f"data worker {number}")
    children.end_with_starter()
    queues.Queue._on_queue_feeder_error = staticmethod(_end_unsent)  # type: ignore[attr-defined]  # a hook of Python's


def _end_unsent(error: Exception, _batch: object) -> None:
    """Ends a worker that cannot send a batch. Python drops the batch, and the loader would wait for it forever."""
    print(f"a data worker cannot send a batch: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


class _StallWatch:
    """A thread that logs what is being read when a step waits longer than `patience` seconds for its data, repeatedly.

    end_if_a_worker_has_died: a method, called while a step waits longer than `_UNNOTICED` seconds.
    """

    def __init__(self, dataset: Steps, patience: float, end_if_a_worker_has_died: Callable[[], None]):
        self._dataset, self._patience = dataset, patience
        self._end = weakref.WeakMethod(end_if_a_worker_has_died)  # weak: this thread does not keep the batches alive
        self.waiting: tuple[float, int] | None = None  # since when, and for which step
        self.done = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="data watch").start()

    def _watch(self) -> None:
        last_warning = 0.0
        while not self.done.wait(min(1.0, self._patience / 4)):
            now, waiting = time.monotonic(), self.waiting
            if waiting is not None and now - waiting[0] > _UNNOTICED:
                self._end_if_a_worker_has_died()
            if waiting is None or now - max(waiting[0], last_warning) < self._patience:
                continue
            last_warning = now
            log.warning("waiting for data for %.0f s: %s", now - waiting[0], self._dataset.last_read(waiting[1]))

    def _end_if_a_worker_has_died(self) -> None:
        if end := self._end():
            end()
