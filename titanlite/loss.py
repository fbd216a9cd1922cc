"""From tokens to the loss: one function for every pass over data.

A step's loss is the sum of the cross entropies of all its labels divided by how many there are, on all ranks and in all
microbatches together, so that neither the mesh nor accumulation changes it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.blocks import IGNORE, SeqInfo
from titanlite.mesh import sum_over_data


def count_labels(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """How many labels count in the global batch of which `tokens` (..., seq + 1) is this rank's part; () float32.

    Stays on the device: nobody waits for it.
    """
    return sum_over_data((tokens[..., 1:] != IGNORE).sum(), mesh).float()


def summed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Sum of the next-token cross entropies of `tokens` (batch, seq + 1) int64; () float32.

    IGNORE in place of a token is no label, and is read as token 0.
    """
    inputs, labels = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    return model.head(model(inputs, SeqInfo(positions)), labels)
