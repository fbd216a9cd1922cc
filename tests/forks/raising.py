"""A fork whose forward pass adds tensors of incompatible shapes."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        hidden = super().forward(x, seq)
        return hidden + hidden[:, :3]
