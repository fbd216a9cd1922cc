"""Small flavors of Qwen 3 and Qwen 2 for the tests."""

import dataclasses

from models.qwen3 import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

_PLAIN = Config(64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, ffn_dim=96, vocab_size=512)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "tied": dataclasses.replace(_PLAIN, tied_embeddings=True),
    "large": dataclasses.replace(_PLAIN, vocab_size=4096),  # for the default tokenizer
    "biased": dataclasses.replace(_PLAIN, qkv_bias=True),
    "biased and tied": dataclasses.replace(_PLAIN, qkv_bias=True, head_dim=8, tied_embeddings=True),
}
