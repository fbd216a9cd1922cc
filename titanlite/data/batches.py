"""Each rank's part of the global batches, read by this process or ahead of it by worker processes.

Which samples a step has follows from the timeline of the run (timeline.py). There is no other state to save, also with workers.
"""

import contextlib
import itertools
import logging
import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Iterator

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
from titanlite.launch import children

log = logging.getLogger(__name__)


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
        # for each step that may be read at once, its number and the row that was begun last
        ahead = self.cfg.workers * self.cfg.prefetch
        self.latest = torch.full((ahead + 1, 2), -1).share_memory_()

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
        segment, first = self.timeline.at(self.first_step + step)
        return self.data.locate(first + self.positions, self.seed, segment)

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
        with _warning_of_stalls(dataset, 0):
            self._source: Iterator[Batch | UserError | StreamStep] = _read_ahead(dataset) if cfg.workers else iter(dataset)
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
        try:
            with _warning_of_stalls(self._dataset, self._step):
                found = next(self._source)
            batch, self._state_ahead = found if isinstance(found, StreamStep) else (found, "")
        # a worker that was killed, or a batch whose shared memory ended with it
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
                raise
            read = self._dataset.read_by_workers(self._step)
            why = "its memory ran out, or a file that it read was truncated or could no longer be read"
            raise RuntimeError(f"a data worker has ended, perhaps because {why}; read last: {read}") from error
        if isinstance(batch, UserError):
            raise batch
        self._step += 1
        return batch if self._stream is None else batch.pin_memory()  # from where a GPU copies asynchronously

    def close(self) -> None:
        """Ends the workers, which end with the last reference to the loader's iterator."""
        self._source = iter(())

    __del__ = close


def _read_ahead(dataset: Steps) -> Iterator[Batch | UserError | StreamStep]:
    """Steps read by worker processes, in order; RuntimeError where one of them dies."""
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
            multiprocessing_context="forkserver",
            worker_init_fn=_start_worker,
            snapshot_every_n_steps=None,  # the position is a number, and the state of a stream comes with each of its steps
        )
    with children.starting({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}):
        return iter(loader)


def _start_worker(_number: int) -> None:
    children.end_with_starter()


@contextlib.contextmanager
def _warning_of_stalls(dataset: Steps, step: int) -> Iterator[None]:
    """Logs what is being read of a step, again and again, while that takes longer than dataloader.stall_seconds."""
    begin, done = time.monotonic(), threading.Event()

    def watch() -> None:
        while not done.wait(dataset.cfg.stall_seconds):
            log.warning("waiting for data for %.0f s: %s", time.monotonic() - begin, dataset.last_read(step))

    threading.Thread(target=watch, daemon=True, name="data watch").start()
    try:
        yield
    finally:
        done.set()
