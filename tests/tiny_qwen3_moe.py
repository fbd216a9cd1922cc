"""Small flavors of Qwen 3's MoE models for the tests."""

import dataclasses

from models.qwen3_moe import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

_PLAIN = Config(64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, expert_dim=32, n_experts=8, top_k=2, vocab_size=512)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "tied": dataclasses.replace(_PLAIN, tied_embeddings=True, normalised=False),
    "large": dataclasses.replace(_PLAIN, vocab_size=4096),  # for the default tokenizer
}
