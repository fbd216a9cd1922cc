"""A fork whose constructor sets a decay and zeroes a matrix, but `initial` makes both random; three others are equal."""

import torch
from torch import nn

from models import llama3
from models.blocks import Constant, Normal
from tests.tiny import FLAVORS, Config, flops, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.decay = nn.Parameter(torch.linspace(0.9, 0.99, config.dim))
        self.gain = nn.Parameter(torch.ones(config.dim))
        self.shift = nn.Parameter(0.02 * torch.randn(config.dim, config.dim))
        self.bias = nn.LayerNorm(config.dim)  # sets ones and zeros
        for layer in self.layers.values():
            nn.init.zeros_(layer.ffn.w2.weight)
            nn.init.normal_(layer.ffn.w1.weight, std=0.02)


def initial(config: Config) -> dict[str, Normal | Constant]:
    return {"gain": Constant(1.0), **llama3.initial(config)}
