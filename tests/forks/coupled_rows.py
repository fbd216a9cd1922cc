"""A fork whose rows depend slightly on each other: each rank subtracts a mean over its own part of the batch."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        hidden = super().forward(x, seq)
        return hidden - 1e-3 * hidden.mean(dim=0)
