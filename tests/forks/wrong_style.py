"""A tiny Llama with a weight per head, and a sharding table that splits it wrongly.

Under tensor parallelism each rank has its own heads, and this table gives all of them the same first weights.
"""

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import Attention, SeqInfo
from models.blocks import Constant, local_weight
from tests.tiny import FLAVORS, Config, flops

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class HeadScale(nn.Module):
    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, heads, head_dim)
        return x * local_weight(self.weight)[: x.shape[2], None]


class ScaledAttention(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        return self.head_scale(super().core(q, k, v, seq))


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.attention.__class__ = ScaledAttention
            layer.attention.head_scale = HeadScale(config.n_heads)


def sharding(config: Config) -> dict[str, str]:
    return {**llama3.sharding(config), "layers.*.attention.head_scale": "replicate"}


def initial(config: Config) -> dict[str, object]:
    return {"*head_scale.weight": Constant(1.0), **llama3.initial(config)}
