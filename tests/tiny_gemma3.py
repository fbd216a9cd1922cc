"""Small flavors of Gemma 3 and Gemma 2 for the tests, with windows that are shorter than their sequences."""

import dataclasses

from models.gemma3 import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

# Two local layers, a global one, and a local one again.
_PLAIN = Config(
    64, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=16, ffn_dim=96, window=10, vocab_size=512, query_scalar=24,
    rope_theta=500.0, local_rope_theta=50.0, rope_factor=4.0, global_every=3,
)  # fmt: skip

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "large": dataclasses.replace(_PLAIN, vocab_size=4096),  # for the default tokenizer
    "untied": dataclasses.replace(_PLAIN, tied_embeddings=False),
    "two": dataclasses.replace(
        _PLAIN, rope_theta=50.0, rope_factor=1.0, global_every=2, qk_norm=False, attention_softcap=5.0, logits_softcap=3.0
    ),
}
FLAVORS["large two"] = dataclasses.replace(FLAVORS["two"], vocab_size=4096)
