"""A fork whose blocks count their calls and compute something else in the second, so that recomputation differs."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Block(llama3.Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        self.calls += 1
        return super().forward(x * (1.0 + 0.01 * self.calls), rope, seq)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.__class__ = Block
            layer.calls = 0
