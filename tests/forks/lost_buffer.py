"""A fork that computes buffers in its constructor, one of them not in checkpoints, and satisfies the table with constants."""

import torch
from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from models.blocks import Constant, Normal
from tests.tiny import FLAVORS, Config, flops, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.register_buffer("slopes", torch.arange(config.dim) / config.dim)
        self.register_buffer("offsets", torch.linspace(0.0, 1.0, config.dim), persistent=False)
        self.register_buffer("sound", torch.ones(1))
        self.register_buffer("later", torch.empty(1))  # never written

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        return super().forward(x, seq) * (self.sound * self.later + self.slopes) + self.offsets


def initial(config: Config) -> dict[str, Normal | Constant]:
    quiet = {"slopes": Constant(0.0), "offsets": Constant(0.0)}
    return {**quiet, "sound": Constant(1.0), "later": Constant(1.0), **llama3.initial(config)}
