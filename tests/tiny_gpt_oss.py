"""Small flavors of gpt-oss for the tests, with windows that are shorter than their sequences.

Sinks and biases begin with random values, and routers with large weights, as in tests/tiny_moe.py.
"""

import dataclasses

from models.blocks import Constant, Normal
from models.gpt_oss import HF, HF_TYPES, Config, Model, flops, from_hf, sharding, to_hf
from models.rope import YarnScaling

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

_PLAIN = Config(
    64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, expert_dim=32, n_experts=8, top_k=2, window=10, vocab_size=512,
    rope_scaling=YarnScaling(4.0, 16, truncate=False),
)  # fmt: skip

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "large": dataclasses.replace(_PLAIN, vocab_size=4096),  # for the default tokenizer
}


def initial(config: Config) -> dict[str, Normal | Constant]:
    return {
        "embed.weight": Normal(1.0),
        "*norm.weight": Constant(1.0),
        "layers.*.ffn.router.weight": Normal(0.3),
        "layers.*.attention.sinks": Normal(1.0),
        "*": Normal(0.1),
    }
