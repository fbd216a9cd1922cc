"""A batch: the tokens of samples, and what of them is a label."""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.head import IGNORE
from titanlite.data.samples import Arrays


class Batch(NamedTuple):
    """One rank's part of a batch, (microbatches, local_batch, ...), or one microbatch of it, (local_batch, ...)."""

    tokens: Tensor  # (..., seq + 1) int64: the inputs and, one position on, the labels
    counted: Tensor | None = None  # (..., seq + 1) bool, False where a token is no label; None: all are
    documents: Tensor | None = None  # (..., seq) int32, each input's document, where attention stays inside documents

    def inputs(self) -> Tensor:
        """(..., seq) int64, what the model reads."""
        return self.tokens[..., :-1]

    def labels(self) -> Tensor:
        """(..., seq) int64, the token that follows each input, IGNORE where it is no label."""
        following = self.tokens[..., 1:]
        return following if self.counted is None else following.masked_fill(~self.counted[..., 1:], IGNORE)

    def further(self, depth: int) -> tuple[Tensor, Tensor]:
        """(the token `depth` positions after each input, the token after that one), (..., seq) int64 each.

        The second one is a label where it is one in `labels`, and no row or document ends before it; IGNORE elsewhere.
        """
        inputs, labels = (tokens.roll(-depth, dims=-1) for tokens in (self.inputs(), self.labels()))
        outside = torch.arange(inputs.shape[-1], device=inputs.device) >= inputs.shape[-1] - depth
        if self.documents is not None:
            outside = outside | (self.documents.roll(-depth, dims=-1) != self.documents)
        return inputs, labels.masked_fill(outside, IGNORE)

    def microbatches(self) -> list["Batch"]:
        """The parts along the leading dimension."""
        return [self.each(itemgetter(number)) for number in range(len(self.tokens))]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The same on a device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from where a GPU copies while the host goes on."""
        return self.each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the allocator from reusing the memory before the work queued on `stream` so far is done."""
        for tensor in self:
            if tensor is not None:
                tensor.record_stream(stream)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same with another form of each tensor."""
        return Batch(change(self.tokens), *(None if tensor is None else change(tensor) for tensor in self[1:]))


def to_batch(arrays: Arrays, local_batch: int) -> Batch:
    """Rows as tensors, (microbatches, local_batch, ...)."""

    def as_tensor(rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).view(-1, local_batch, rows.shape[1])

    return Batch(as_tensor(arrays.tokens), *(None if rows is None else as_tensor(rows) for rows in arrays[1:]))
