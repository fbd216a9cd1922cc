"""The fork with a router of its own, whose scores have so much in common that bfloat16 cannot tell them apart."""

from torch import Tensor, nn

from tests.forks.right import own_router
from tests.forks.right.own_router import FLAVORS, KEEP, Config, flops, initial, sharding

__all__ = ["FLAVORS", "KEEP", "Config", "Model", "flops", "initial", "sharding"]


class Offset(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 300.0


class Model(own_router.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn.router.__class__ = Offset
