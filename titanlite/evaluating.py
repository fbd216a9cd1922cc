"""A model in forward passes that no backward pass follows."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without gradients and dropout, and what FSDP keeps for a backward pass given back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
    for module in model.modules():  # what is kept for a backward pass that does not come
        if isinstance(module, FSDPModule):
            module.reshard()
