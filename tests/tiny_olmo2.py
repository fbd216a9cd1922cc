"""Small flavors of OLMo 2 for the tests."""

import dataclasses

from models.olmo2 import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

_PLAIN = Config(64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=96, vocab_size=512, rope_theta=10_000.0)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "tied": dataclasses.replace(_PLAIN, tied_embeddings=True),
}
