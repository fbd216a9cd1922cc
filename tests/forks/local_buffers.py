"""A fork whose buffers depend on one rank's results, or on recomputation, or are in no checkpoint; one is correct."""

import torch
from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from models.blocks import Constant, Normal
from tests.tiny import FLAVORS, Config, flops, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Block(llama3.Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1.0)
        return super().forward(x, rope, seq)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.register_buffer("tokens", torch.zeros(1))
        self.register_buffer("spread", torch.zeros(1), persistent=False)
        self.register_buffer("used", torch.zeros(1))
        for layer in self.layers.values():
            layer.__class__ = Block
            layer.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        hidden = super().forward(x, seq)
        with torch.no_grad():
            self.tokens += x.numel()
            self.used.fill_(1.0)
            self.spread.lerp_(hidden.float().square().mean(), 0.1)
        return hidden


def initial(config: Config) -> dict[str, Normal | Constant]:
    buffers = {"tokens": Constant(0.0), "spread": Constant(0.0), "used": Constant(0.0), "layers.*.calls": Constant(0.0)}
    return {**buffers, **llama3.initial(config)}
