"""A fork whose factors, one a feature, miss the sum of their gradients over tensor-parallel ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models import llama3
from models.attention import SeqInfo
from models.blocks import Constant
from tests.tiny import FLAVORS, Config, flops

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Factor(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        return x * (self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight)


class Block(llama3.Block):
    def __init__(self, config: Config):
        super().__init__(config)
        self.factor = Factor(config.dim)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        return super().forward(self.factor(x), rope, seq)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})


def sharding(config: Config) -> dict[str, str]:
    return {**llama3.sharding(config), "layers.*.factor": "replicate"}


def initial(config: Config) -> dict[str, object]:
    return {"*factor.weight": Constant(1.0), **llama3.initial(config)}
