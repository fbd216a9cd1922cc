"""A correct fork whose small parameters have gradients of cancelling terms, so that float32 rounding is a large part of them.

Four residual streams with a learned mixing matrix (hyper-connections, arXiv:2409.19606), a learned share of the embedding in
each layer, and values mixed with those of the first layer (value residual learning, arXiv:2410.17897).
"""

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import Attention, SeqInfo, with_mask
from models.blocks import Constant, Flops, apply_rope, local_weight
from models.rope import rotation
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

STREAMS = 4


class Weights(nn.Module):
    """A few learned numbers."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return local_weight(self.weight)


class MixedValues(Attention):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo, first: Tensor | None = None):
        q, k, v = self.project(x)
        if first is not None:
            own, of_first = self.values().unbind()
            v = own * v + of_first * first
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        return self.wo(self.core(q, k, v, seq).flatten(-2)), v


class Block(llama3.Block):
    def __init__(self, config: Config, first: bool):
        super().__init__(config)
        self.attention = MixedValues(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        if not first:
            self.attention.values = Weights(2)
        self.mix, self.residual = Weights(STREAMS, STREAMS), Weights(2)

    def forward(self, x: Tensor, start: Tensor, first: Tensor | None, rope: tuple[Tensor, Tensor], seq: SeqInfo):
        own, of_start = self.residual().unbind()
        x = own * torch.einsum("ij,bsjd->bsid", self.mix(), x) + of_start * start[:, :, None]  # (batch, seq, streams, dim)
        out, values = self.attention(self.attention_norm(x[:, :, 0]), rope, seq, first)
        x = x + out[:, :, None]
        return x + self.ffn(self.ffn_norm(x[:, :, 1]))[:, :, None], values


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): Block(config, first=i == 0) for i in range(config.n_layers)})

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        c = self.config
        start, first, seq = self.embed(x), None, with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        x = start[:, :, None].expand(-1, -1, STREAMS, -1)
        for layer in self.layers.values():
            x, values = layer(x, start, first, rope, seq)
            first = values if first is None else first
        return x.mean(dim=2)


def sharding(config: Config) -> dict[str, str]:
    small = {"layers.*.mix": "replicate", "layers.*.residual": "replicate", "layers.*.attention.values": "replicate"}
    return {**llama3.sharding(config), **small}


def initial(config: Config) -> dict[str, object]:
    small = {"*.mix.weight": Constant(0.25), "*.residual.weight": Constant(0.5), "*.values.weight": Constant(0.5)}
    return {**small, **llama3.initial(config)}


def flops(config: Config, seq_len: int) -> Flops:
    of_mixing = 6 * config.n_layers * STREAMS**2 * config.dim
    return Flops(*(count + of_mixing for count in llama3.flops(config, seq_len)))
