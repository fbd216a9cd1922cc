"""Global batches, and each rank's part of them. The position in the data is one number: samples consumed so far."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, Mapper, PinMemory, Prefetcher

from titanlite.data.order import sample_at
from titanlite.data.tokens import TokenData

_AHEAD = 4  # batches that are prepared while the device works


def count_samples(data: TokenData, seq_len: int) -> int:
    """Samples in an epoch. Neighbours share one token: the last label of one is the first input of the next."""
    return (len(data.ids) - 1) // seq_len


def read_samples(data: TokenData, positions: np.ndarray, seq_len: int, seed: int) -> Tensor:
    """The samples at some positions of the training order; -> (len(positions), seq_len + 1) int64."""
    starts = sample_at(positions, count_samples(data, seq_len), seed) * seq_len
    return torch.from_numpy(np.stack([data.ids[start : start + seq_len + 1] for start in starts]).astype(np.int64))


def batches(
    data: TokenData,
    consumed: int,
    global_batch: int,
    local_batch: int,
    seq_len: int,
    seed: int,
    part: tuple[int, int],
    pin_memory: bool,
) -> Iterator[Tensor]:
    """Endlessly, one step after the other, this rank's part of the global batch, read ahead by a thread.

    consumed: samples that earlier steps have used; the next step uses `consumed` .. `consumed + global_batch - 1`.
    part: (data rank, data degree); each rank takes a run of neighbouring samples. Yields (microbatches, local_batch,
    seq_len + 1) int64.
    """
    rank, degree = part
    share = global_batch // degree
    assert share * degree == global_batch and share % local_batch == 0

    def read(step: int) -> Tensor:
        first = consumed + step * global_batch + rank * share
        return read_samples(data, np.arange(first, first + share), seq_len, seed).unflatten(0, (-1, local_batch))

    node = Mapper(IterableWrapper(_CountUp()), read)
    source = Prefetcher(PinMemory(node) if pin_memory else node, prefetch_factor=_AHEAD)
    source.reset()  # starts the thread; it ends with the last reference to source, which a Loader's circle would delay
    return source


class _CountUp:
    """0, 1, 2, ... as an iterable that can be started again."""

    def __iter__(self) -> Iterator[int]:
        step = 0
        while True:
            yield step
            step += 1
