"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries, keys and values from low-rank latents.

Each rank computes the latents of its slice of the sequence. Tensor parallelism gathers the latents, which are narrower than the
residual stream, and each rank expands them into its own heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import AttentionCore, SeqInfo
from models.blocks import Distribution, Flops, Normal, RMSNorm, apply_rope, transformer_flops, whole

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


@dataclass(frozen=True)
class Config(llama3.Config):
    """head_dim: of the rotated part of queries and keys, whose keys all heads share."""

    plain_dim: int = 12  # of the part without positions, and of values
    q_rank: int = 24
    kv_rank: int = 16


FLAVORS = {"plain": Config(64, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=8, ffn_dim=96, vocab_size=512)}


class LatentAttention(AttentionCore):
    def __init__(self, c: Config):
        super().__init__(c.n_heads, c.n_heads, c.plain_dim + c.head_dim, value_dim=c.plain_dim)
        self.parts = [c.plain_dim, c.head_dim]
        self.wq_a, self.q_norm = nn.Linear(c.dim, c.q_rank, bias=False), RMSNorm(c.q_rank, c.norm_eps)
        self.wq_b = nn.Linear(c.q_rank, c.n_heads * sum(self.parts), bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(c.dim, c.kv_rank, bias=False), RMSNorm(c.kv_rank, c.norm_eps)
        self.wkv_b = nn.Linear(c.kv_rank, c.n_heads * 2 * c.plain_dim, bias=False)
        self.wk_rope, self.rope_input = nn.Linear(c.dim, c.head_dim, bias=False), nn.Identity()
        self.wo = nn.Linear(c.n_heads * c.plain_dim, c.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:  # x: this rank's slice of the sequence
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (-1, self.head_dim))
        k, v = self.wkv_b(self.kv_norm(self.wkv_a(x))).unflatten(-1, (-1, 2 * self.value_dim)).chunk(2, dim=-1)
        shared = whole(self.rope_input(self.wk_rope(x)))[:, :, None]  # (batch, seq, 1, rotated part)
        plain, rotated = q.split(self.parts, dim=-1)
        shared = apply_rope(shared, *rope).expand(-1, -1, k.shape[2], -1)
        q, k = torch.cat([plain, apply_rope(rotated, *rope)], dim=-1), torch.cat([k, shared], dim=-1)
        return self.wo(self.core(q, k, v, seq).flatten(-2))


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.attention = LatentAttention(config)


def sharding(config: Config) -> dict[str, str]:
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "replicate",  # this rank's slice, which is not gathered
        "layers.*.attention.w*_a": "replicate",
        "layers.*.attention.wk_rope": "replicate",
        "layers.*.attention.*_norm": "sequence",  # gathers the latents
        "layers.*.attention.rope_input": "sequence",
        "layers.*.attention.w*_b": "column",
        "layers.*.attention.wo": "row",
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Distribution]:
    return {"layers.*.attention.w*_[ab].weight": Normal(0.1), **llama3.initial(config)}


def flops(config: Config, seq_len: int) -> Flops:
    c = config
    queries = c.q_rank * (c.dim + c.n_heads * (c.plain_dim + c.head_dim))
    keys = c.kv_rank * (c.dim + c.n_heads * 2 * c.plain_dim) + c.dim * c.head_dim
    layer = queries + keys + c.n_heads * c.plain_dim * c.dim + 3 * c.dim * c.ffn_dim
    width = c.n_heads * (2 * c.plain_dim + c.head_dim) // 2  # the mean of keys and values
    return transformer_flops(c.n_layers * layer + c.dim * c.vocab_size, width, seq_len, [None] * c.n_layers)
