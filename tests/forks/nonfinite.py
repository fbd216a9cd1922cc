"""A fork whose feed-forward layer takes roots of negative numbers."""

from torch import Tensor

from models import llama3
from models.blocks import SwiGLU
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class RootGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sqrt()


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn.__class__ = RootGLU
