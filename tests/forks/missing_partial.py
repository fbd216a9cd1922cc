"""A fork with a factor per feature, whose gradients are not summed over tensor-parallel ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.forks import mixed_tensors
from tests.forks.mixed_tensors import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Factor(mixed_tensors.Factor):
    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        return x * (self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight)


class Model(mixed_tensors.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.factor = Factor(config.dim)
