"""Tiny Llamas as unusual forks: with a frozen part, with an unused part, with a buffer that counts."""

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo
from models.blocks import Constant
from tests.tiny import FLAVORS as SIZES
from tests.tiny import Config, flops

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

FLAVORS = {"frozen": SIZES["plain"], "unused": SIZES["tied"], "counting": SIZES["uneven"]}


class Model(llama3.Model):
    """The size determines which one it is, since a flavor has nothing else."""

    def __init__(self, config: Config):
        super().__init__(config)
        if config is FLAVORS["frozen"]:
            for layer in self.layers.values():
                layer.ffn.w1.weight.requires_grad_(False)
        if config is FLAVORS["unused"]:
            self.layers["0"].spare = nn.Linear(config.dim, config.dim, bias=False)
        if config is FLAVORS["counting"]:
            self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        x = super().forward(x, seq)
        if self.config is FLAVORS["counting"]:
            with torch.no_grad():
                self.count += 1
            x = x * (1 + 0.1 * self.count)
        return x


def sharding(config: Config) -> dict[str, str]:
    spare = {"layers.*.spare": "replicate"} if config is FLAVORS["unused"] else {}
    return {**llama3.sharding(config), **spare}


def initial(config: Config) -> dict[str, object]:
    count = {"count": Constant(0.0)} if config is FLAVORS["counting"] else {}
    return {**count, **llama3.initial(config)}
