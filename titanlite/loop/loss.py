"""From a batch to the loss: one function for every pass over data.

A step's loss is the sum of the cross entropies of all its labels divided by how many there are, on all ranks and in all
microbatches together, so that neither the mesh nor accumulation changes it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.attention import SeqInfo
from models.blocks import positions_in_documents
from models.head import IGNORE
from titanlite.data.batch import Batch
from titanlite.parallel.mesh import sum_over_data


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
