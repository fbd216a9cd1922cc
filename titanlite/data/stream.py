"""A stream of the user's own: one for each data rank, whose rows follow each other and whose state is in every checkpoint."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from titanlite.config.schema import Config
from titanlite.data.batch import Batch, to_batch
from titanlite.data.own import OpenStream, OwnSource
from titanlite.data.samples import Arrays, fill
from titanlite.data.timeline import Timeline
from titanlite.ground.errors import UserError
from titanlite.registry.own import function_of


class Position(NamedTuple):
    """Where the streams of a run are."""

    sample: int  # of the run, which comes next
    states: list[Any]  # of each data rank; none: at their beginning


class StreamStep(NamedTuple):
    """This rank's part of a step, or the fault in the data, and the state of the stream after it as JSON."""

    batch: Batch | UserError
    state: str


class StreamDataset(IterableDataset[StreamStep]):
    """This rank's part of the global batches of a run, read from a stream.

    One process reads it, however many dataloader.workers there are: two would need a state each, and mix their rows.
    """

    def __init__(
        self, config: Config, source: OwnSource, part: tuple[int, int], timeline: Timeline, first_step: int, at: Position | None
    ):
        """part: (data rank, data degree). at: where the streams are; None: at their beginning.

        Raises UserError for states of another data degree, unless the stream offers `reshard`.
        """
        self.source, self.part, self.timeline, self.first_step = source, part, timeline, first_step
        self.cfg = config.dataloader.model_copy(update={"workers": min(1, config.dataloader.workers)})
        self.training, self.share = config.training, timeline.at(first_step)[0].global_batch // part[1]
        self.sample = at.sample if at else 0  # of the run, that the stream gives next
        self.state = states_for(source, at.states, part[1])[part[0]] if at and at.states else None
        self.count = torch.zeros(1, dtype=torch.int64).share_memory_()  # rows read since the start, also by a worker

    def __iter__(self) -> Iterator[StreamStep]:
        """The steps from `first_step` on; a fault is the last item, as for StepDataset."""
        try:
            stream = OpenStream(self.source, *self.part, self.count, self.state)
            for step in itertools.count(self.first_step):
                first = self.timeline.at(step)[1]
                for _ in range((first - self.sample) // self.part[1]):  # what a rollback has left out
                    stream.next()
                batch = self._read(stream)
                self.sample = first + self.share * self.part[1]
                yield StreamStep(batch, stream.state())
        except UserError as error:
            yield StreamStep(error, "")

    def _read(self, stream: OpenStream) -> Batch:
        shape = self.share, self.training.seq_len + 1
        documents = np.empty((self.share, self.training.seq_len), np.int32) if self.training.document_mask else None
        arrays = Arrays(np.empty(shape, np.int64), np.empty(shape, bool), documents)
        for at in range(self.share):
            fill(arrays, at, stream.next())
        return to_batch(arrays, self.training.local_batch_size)

    def last_read(self, _step: int) -> str:
        """The row that is being read, for a message."""
        return f'source "{self.source.name}", {self.source.where(int(self.count))}'

    read_by_workers = last_read


def states_for(source: OwnSource, states: list[Any], degree: int) -> list[Any]:
    """The states of a stream for this many data ranks. Raises UserError where it cannot divide those that there are."""
    if len(states) == degree:
        return states
    saved = f"the checkpoint has the states of {len(states)} data ranks, and this run has {degree}"
    reshard = reshard_of(source, saved)
    with source.failing(f"{saved}: reshard fails"):
        states = list(reshard(states, degree))
    if len(states) != degree:
        raise source.fault(f"{saved}: reshard returns {len(states)} states")
    return states


def reshard_of(source: OwnSource, difference: str) -> Callable[[list[Any], int], Any]:
    """A stream's `reshard`. difference: of two numbers of data ranks. Raises UserError for a stream without one."""
    reshard = getattr(function_of(source.key, source.cfg.path, classes=True), "reshard", None)
    if reshard is None:
        remedy = "use as many (replay: --ranks), or give the stream a static method reshard(states, degree) -> list"
        raise source.fault(f"{difference}: {remedy}")
    return reshard
