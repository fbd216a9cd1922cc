"""A fork whose feed-forward layer also reads the previous token, as RWKV's does, so that it cannot compute parts of a
sequence.
"""

from torch import Tensor
from torch.nn import functional as F

from models import llama3
from models.blocks import SwiGLU
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class ShiftGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn.__class__ = ShiftGLU
