"""A fork whose last layer has one key-value head, which two ranks cannot share, although they could split its matrices."""

from models import llama3
from models.attention import Attention
from models.blocks import Flops
from tests.tiny import FLAVORS, Config, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        last = self.layers[str(config.n_layers - 1)]
        last.attention = Attention(config.dim, config.n_heads, 1, config.head_dim)


def flops(config: Config, seq_len: int) -> Flops:
    saved = 6 * config.dim * config.head_dim * 2 * (config.n_kv_heads - 1)
    every = llama3.flops(config, seq_len)
    return Flops(every.causal - saved, every.palm - saved)
