"""Every layer adds the first layer's values, mixed by a learned matrix (value residual learning, arXiv:2410.17897).

The values cross layers: a block takes those of the first layer and returns its own with the hidden states.
"""

import torch
from torch import Tensor, nn

from models import attention, llama3
from models.attention import SeqInfo, with_mask
from models.blocks import Distribution, Flops, Identity, apply_rope, local_weight
from models.rope import rotation
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Attention(attention.Attention):
    def forward(  # type: ignore[override]
        self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo, first: Tensor | None, mix: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        v = v + (v if first is None else first) @ mix  # (batch, seq, kv heads of this rank, head_dim)
        return self.wo(self.core(q, k, v, seq).flatten(-2)), v


class Block(llama3.Block):
    def __init__(self, config: Config):
        super().__init__(config)
        self.attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        self.mix = nn.Parameter(torch.empty(config.head_dim, config.head_dim))

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        attended, values = self.attention(self.attention_norm(x), rope, seq, first, local_weight(self.mix))
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), values


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        c, first = self.config, None
        x, seq = self.embed(x), with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x, values = layer(x, rope, seq, first)
            first = values if first is None else first
        return x


def sharding(config: Config) -> dict[str, str]:
    # "mix" is a parameter of the block itself. The pattern "layers.*" would match every module in the blocks too.
    return {**{f"layers.{i}": "replicate" for i in range(config.n_layers)}, **llama3.sharding(config)}


def initial(config: Config) -> dict[str, Distribution]:
    return {"layers.*.mix": Identity(0.5), **llama3.initial(config)}


def flops(config: Config, seq_len: int) -> Flops:
    mixing = 6 * config.n_layers * config.n_kv_heads * config.head_dim**2
    return Flops(*(count + mixing for count in llama3.flops(config, seq_len)))
