"""The tiny Llama with dropout: a model whose forward pass draws random numbers."""

from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        return self.dropout(super().forward(x, seq))
