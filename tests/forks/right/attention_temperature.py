"""Attention that grows sharper with the position of the query in its document, as in Llama 4's layers without RoPE."""

from torch import Tensor

from models import attention, llama3
from models.attention import SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Attention(attention.Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        sharpness = 1.0 + 0.5 * (1.0 + seq.positions // 4).log()
        return super().core(q * sharpness[:, :, None, None].to(q.dtype), k, v, seq)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
