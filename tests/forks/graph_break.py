"""A fork whose block reads a value on the host, so that it cannot be one graph."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Block(llama3.Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        if x.abs().max() > 1e4:
            x = x / 2
        return super().forward(x, rope, seq)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.__class__ = Block
