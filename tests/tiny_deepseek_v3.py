"""Small flavors of DeepSeek-V3 for the tests."""

import dataclasses

from models.deepseek_v3 import FLAVORS as PUBLISHED
from models.deepseek_v3 import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf, unused_in_hf

# fmt: off
__all__ = [
    "FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf", "unused_in_hf",
]
# fmt: on

_PLAIN = Config(
    *(64, 3, 4, 24, 16),  # dim, layers, heads, ranks of queries and of keys
    ffn_dim=96,
    expert_dim=32,
    n_experts=8,
    top_k=3,
    plain_dim=12,
    rope_dim=8,
    value_dim=12,
    groups=4,
    top_groups=2,
    scale=2.5,
    vocab_size=512,
)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "moonlight": dataclasses.replace(_PLAIN, q_rank=None, shared_experts=2, groups=1, top_groups=1),
    "yarn": dataclasses.replace(_PLAIN, rope_scaling=PUBLISHED["671b"].rope_scaling, interleaved=False, dense_layers=0),
    "large": dataclasses.replace(_PLAIN, vocab_size=4096),  # for the default tokenizer
}
