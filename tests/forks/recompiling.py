"""A fork whose blocks get the step number as a string, so that every step is recompiled."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Block(llama3.Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        return super().forward(x, rope, seq) * (0.5 if self.phase == "step 1" else 1.0)


class Model(llama3.Model):
    steps = 0

    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.__class__ = Block

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        self.steps += 1
        for layer in self.layers.values():
            layer.phase = f"step {self.steps}"
        return super().forward(x, seq)
