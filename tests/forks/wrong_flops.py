"""A fork that counts two of the three matrices of its feed-forward layer."""

from models import llama3
from models.blocks import Flops
from tests.tiny import FLAVORS, Config, Model, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


def flops(config: Config, seq_len: int) -> Flops:
    third = 6 * config.n_layers * config.dim * config.ffn_dim
    every = llama3.flops(config, seq_len)
    return Flops(causal=every.causal - third, palm=every.palm - third)
