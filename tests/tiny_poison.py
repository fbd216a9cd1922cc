"""The tiny Llama with two tokens that spoil a batch: one makes the loss NaN, the other only the gradients."""

import torch
from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "OF_GRADIENT", "OF_LOSS", "Config", "Model", "flops", "initial", "sharding"]

OF_LOSS, OF_GRADIENT = 7, 8  # the learnable data of the tests has neither


class Model(llama3.Model):
    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        loss, gradient = (torch.where((x == token).any(), torch.nan, 1.0) for token in (OF_LOSS, OF_GRADIENT))
        hidden = super().forward(x, seq) * loss
        if hidden.requires_grad:
            hidden.register_hook(lambda slope: slope * gradient)
        return hidden
