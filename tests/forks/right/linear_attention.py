"""A hybrid: every second layer is gated linear attention (arXiv:2312.06635), with one decay for each token and head.

S_t = a_t S_(t-1) + k_t v_t', o_t = q_t S_t. A forward pass computes all its tokens in the quadratic, parallel form. Generation
keeps S, which must not depend on padding or on the number of tokens per pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo, dense_mask
from models.blocks import Distribution, Flops, RMSNorm, Uniform, transformer_flops
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class GatedLinearAttention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, self.head_dim = config.n_heads * config.head_dim, config.head_dim
        self.wq, self.wk = nn.Linear(config.dim, width, bias=False), nn.Linear(config.dim, width, bias=False)
        self.wv, self.wo = nn.Linear(config.dim, width, bias=False), nn.Linear(width, config.dim, bias=False)
        self.wa = nn.Linear(config.dim, config.n_heads)
        self.norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).float() for w in (self.wq, self.wk, self.wv))
        decay = F.logsigmoid(self.wa(x).float()).transpose(1, 2)  # (batch, heads, seq)
        out = self.mix(q, k, v, decay, seq).transpose(1, 2).to(x.dtype)
        return self.wo(self.norm(out).flatten(-2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, seq: SeqInfo) -> Tensor:
        """q, k, v: (batch, heads, seq, head_dim); decay: log a. Returns q's shape."""
        if seq.cache is not None:
            tensors, real = seq.cache.state(self)
            k, decay = k * real[:, None, :, None], decay * real[:, None]  # padding adds nothing and does not decay the state
        total = decay.cumsum(-1)
        documents = seq.positions.new_zeros(1, q.shape[2]) if seq.documents is None else seq.documents
        weight = (total[..., :, None] - total[..., None, :]).masked_fill(~dense_mask(documents), -torch.inf).exp()
        out = (q @ k.transpose(-2, -1) * weight) @ v
        if seq.cache is not None:
            added = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-2, -1) @ v
            before = tensors.get("memory", torch.zeros_like(added))  # (batch, heads, head_dim, head_dim)
            out = out + (q * total.exp()[..., None]) @ before
            tensors["memory"] = before * total[..., -1, None, None].exp() + added
        return out


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for index in range(0, config.n_layers, 2):
            self.layers[str(index)].attention = GatedLinearAttention(config)


def sharding(config: Config) -> dict[str, str]:
    return {"layers.*.attention.wa": "column", "layers.*.attention.norm": "replicate", **llama3.sharding(config)}


def initial(config: Config) -> dict[str, Distribution]:
    return {"layers.*.attention.wa.bias": Uniform(1.0, 4.0), **llama3.initial(config)}


def flops(config: Config, seq_len: int) -> Flops:
    c, linear = config, (config.n_layers + 1) // 2
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    of_linear = c.dim * (4 * c.n_heads * c.head_dim + c.n_heads)
    matmul = linear * of_linear + (c.n_layers - linear) * attention + c.n_layers * 3 * c.dim * c.ffn_dim
    return transformer_flops(matmul + c.dim * c.vocab_size, c.n_heads * c.head_dim, seq_len, [None] * c.n_layers)
