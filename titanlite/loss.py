"""From a batch to the loss: one function for every pass over data.

A step's loss is the sum of the cross entropies of all its labels divided by how many there are, on all ranks and in all
microbatches together, so that neither the mesh nor accumulation changes it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.attention import SeqInfo
from models.blocks import positions_in_documents
from models.head import IGNORE
from titanlite.mesh import sum_over_data


class Batch(NamedTuple):
    """One rank's part of a batch, (microbatches, local_batch, ...), or one microbatch of it, (local_batch, ...)."""

    tokens: Tensor  # (..., seq + 1) int64: the inputs and, one place on, the labels
    counted: Tensor | None = None  # (..., seq + 1) bool, False where a token is no label; None: all are
    documents: Tensor | None = None  # (..., seq) int32, each input's document, where attention stays inside documents

    def inputs(self) -> Tensor:
        """(..., seq) int64, what the model reads."""
        return self.tokens[..., :-1]

    def labels(self) -> Tensor:
        """(..., seq) int64, what it must tell of each input, IGNORE where nothing is asked."""
        following = self.tokens[..., 1:]
        return following if self.counted is None else following.masked_fill(~self.counted[..., 1:], IGNORE)

    def microbatches(self) -> list["Batch"]:
        """The parts along the leading dimension."""
        return [self._each(lambda tensor, number=number: tensor[number]) for number in range(len(self.tokens))]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The same on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from where a GPU copies while the host goes on."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory from being used anew before what `stream` has been given so far is done."""
        for tensor in self:
            if tensor is not None:
                tensor.record_stream(stream)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(*(None if tensor is None else change(tensor) for tensor in self))


def count_labels(batch: Batch, mesh: DeviceMesh) -> Tensor:
    """How many labels the global batch has, of which `batch` is this rank's part; () float32, to divide the loss by.

    At least 1: the loss of a batch without labels, which chats can give, is 0. Stays on the device: nobody waits for it.
    """
    return sum_over_data((batch.labels() != IGNORE).sum(), mesh).clamp(min=1).float()


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the cross entropies of one microbatch, (batch, seq) labels; () float32."""
    inputs, documents = batch.inputs(), batch.documents
    if documents is None:
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    else:
        positions = positions_in_documents(documents)
    return model.head(model(inputs, SeqInfo(positions, documents)), batch.labels())
