"""Small flavors of Llama 3 for the tests, as a user would add them: an own module, found by its dotted name."""

import dataclasses

from models.llama3 import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf
from models.rope import Llama3Scaling

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

_PLAIN = Config(64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=96, vocab_size=512, rope_theta=10_000.0)
# Short enough for a test's sequence to reach all three ranges of wavelengths.
_SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "tied": dataclasses.replace(_PLAIN, tied_embeddings=True),
    "uneven": dataclasses.replace(_PLAIN, vocab_size=515),
    "deep": dataclasses.replace(_PLAIN, n_layers=4),
    "large": dataclasses.replace(_PLAIN, vocab_size=4096),  # for the default tokenizer
    "large tied": dataclasses.replace(_PLAIN, vocab_size=4096, tied_embeddings=True),
    "scaled": dataclasses.replace(_PLAIN, rope_scaling=_SCALING),
}
