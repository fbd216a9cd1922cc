"""The tiny Llama, which ties in its constructor, as nanoGPT does: the head is the table of an embedding module that also has a
gain, and each block's two input projections are one matrix.
"""

import torch
from torch import Tensor, nn

from models import llama3
from models.blocks import Constant, Distribution, Normal, local_weight
from models.llama3 import flops
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Embedding(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.dim)
        self.gain = nn.Parameter(torch.empty(config.dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) * local_weight(self.gain)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.embed = Embedding(config)
        self.head.output.weight = self.embed.table.weight
        for layer in self.layers.values():
            layer.ffn.w3.weight = layer.ffn.w1.weight


def sharding(config: Config) -> dict[str, str]:
    of_llama = {name: style for name, style in llama3.sharding(config).items() if name != "embed"}
    return {"embed": "replicate", "embed.table": "vocab", **of_llama}


def initial(config: Config) -> dict[str, Distribution]:
    of_llama = {name: how for name, how in llama3.initial(config).items() if name != "embed.weight"}
    return {"embed.table.weight": Normal(0.02), "embed.gain": Constant(4.0), **of_llama}
