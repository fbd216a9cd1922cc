"""A hybrid: attention, linear attention with a state per token, and feed-forward-only layers, in the order of `pattern`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import Attention, SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, SwiGLU
from models.decoder import Decoder
from models.head import Head
from models.rope import rotation

_HEAD = 8


@dataclass(frozen=True)
class Config:
    """pattern: a letter for each layer: a, attention; w, attention in a window; l, linear attention; m, feed-forward only."""

    pattern: str
    dim: int = 64
    vocab_size: int = 512


FLAVORS = {"plain": Config("alm"), "mixed": Config("aallmmlla")}


class LinearAttention(nn.Module):
    """A running sum of outer products: (batch, seq, heads, head_dim, head_dim) is kept for the backward pass."""

    def __init__(self, dim: int):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, _HEAD)) for part in (self.wq, self.wk, self.wv))
        state = (k[..., None] * v[..., None, :]).cumsum(1)
        return self.wo((q[..., None, :] @ (state / torch.full_like(state, 16.0))).squeeze(-2).flatten(-2))


class Block(nn.Module):
    def __init__(self, kind: str, dim: int):
        super().__init__()
        self.norm = RMSNorm(dim, 1e-5)
        makers = {"l": lambda: LinearAttention(dim), "m": lambda: SwiGLU(dim, 40)}
        self.mixer = makers.get(kind, lambda: Attention(dim, dim // _HEAD, dim // _HEAD, _HEAD))()
        self.takes_sequence = kind != "m"

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        others = (rope, seq) if self.takes_sequence else ()
        return x + self.mixer(self.norm(x), *others)


class Model(Decoder):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(kind, config.dim) for i, kind in enumerate(config.pattern)})
        self.head = Head(RMSNorm(config.dim, 1e-5), config.dim, config.vocab_size)

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        x = self.embed(x)
        rope = rotation(seq, _HEAD, 1e4)
        whole, window = with_mask(seq), with_mask(seq, 5)
        for number, layer in self.layers.items():
            x = layer(x, rope, window if self.config.pattern[int(number)] == "w" else whole)
        return x


def sharding(config: Config) -> dict[str, str]:
    """Layer by layer, as an author of a hybrid may write it."""
    table = {"embed": "vocab", "layers.*.norm": "sequence", "head.norm": "sequence", "head.output": "vocab"}
    for number, kind in enumerate(config.pattern):
        column, row = ("w[13]", "w2") if kind == "m" else ("w[qkv]", "wo")
        table |= {f"layers.{number}.mixer.{column}": "column", f"layers.{number}.mixer.{row}": "row"}
    return table


def initial(config: Config) -> dict[str, Normal | Constant]:
    return {"*norm.weight": Constant(1.0), "*": Normal(0.02)}


def flops(config: Config, seq_len: int) -> Flops:
    return Flops(1.0, 1.0)  # not tested
