"""The tiny Llama with dropout in each block: every stage of a pipeline draws random numbers."""

import torch.nn.functional as F
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Block(llama3.Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        return F.dropout(super().forward(x, rope, seq), 0.2, self.training)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleDict({name: Block(config) for name in self.layers})
