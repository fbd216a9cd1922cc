"""Attention and feed-forward side by side after one norm, with norms on queries and keys and a learned gate for each head."""

import torch
from torch import Tensor, nn

from models import attention, llama3
from models.attention import SeqInfo
from models.blocks import Constant, Distribution, RMSNorm, SwiGLU, apply_rope, local_weight
from tests.tiny import FLAVORS, Config, flops

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Attention(attention.Attention):
    def __init__(self, config: Config):
        super().__init__(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim, config.norm_eps), RMSNorm(config.head_dim, config.norm_eps)
        self.gate = nn.Parameter(torch.empty(config.n_heads))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        q, k, v = self.project(x)
        q, k = apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope)
        gate = local_weight(self.gate).sigmoid()  # of this rank's heads
        return self.wo((self.core(q, k, v, seq) * gate[:, None]).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        normed = self.norm(x)  # gathered once for both under tensor parallelism
        return x + self.attention(normed, rope, seq) + self.ffn(normed)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})


def sharding(config: Config) -> dict[str, str]:
    return {
        "embed": "vocab",
        "layers.*.norm": "sequence",
        "layers.*.attention": "features",  # the gate, a parameter of the module itself
        "layers.*.attention.[qk]_norm": "replicate",  # each rank normalizes its own heads
        "layers.*.attention.w[qkv]": "column",
        "layers.*.attention.wo": "row",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Distribution]:
    return {"layers.*.attention.gate": Constant(2.0), **llama3.initial(config)}
