"""A fork whose constructor sets a decay, a matrix and two buffers, which `initial` overrides; other values are equal."""

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo
from models.blocks import Constant, Normal
from tests.tiny import FLAVORS, Config, flops
from tests.tiny import sharding as of_tiny

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.decay = nn.Parameter(torch.linspace(0.9, 0.99, config.dim))
        self.gain = nn.Parameter(torch.ones(config.dim))
        self.shift = nn.Parameter(0.02 * torch.randn(config.dim, config.dim))
        self.bias = nn.LayerNorm(config.dim)  # sets ones and zeros
        self.register_buffer("rates", torch.arange(config.dim) / config.dim)
        self.register_buffer("offsets", torch.linspace(0.0, 1.0, config.dim), persistent=False)
        self.register_buffer("sound", torch.ones(1))
        self.register_buffer("later", torch.empty(1))  # never written
        for layer in self.layers.values():
            nn.init.zeros_(layer.ffn.w2.weight)
            nn.init.normal_(layer.ffn.w1.weight, std=0.02)

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        return super().forward(x, seq) * (self.sound * self.later + self.rates) + self.offsets


def sharding(config: Config) -> dict[str, str]:
    return {**of_tiny(config), "": "replicate", "bias": "replicate"}


def initial(config: Config) -> dict[str, Normal | Constant]:
    quiet = {"rates": Constant(0.0), "offsets": Constant(0.0), "sound": Constant(1.0), "later": Constant(1.0)}
    return {**quiet, "gain": Constant(1.0), "bias.weight": Constant(1.0), "bias.bias": Constant(0.0), **llama3.initial(config)}
