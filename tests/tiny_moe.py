"""MoE models with every kind of router, for the tests: as in Qwen 3, and as in DeepSeek-V3.

Routers start with large weights, so that the best experts of a token clearly beat the next one: routing must not depend on
rounding when meshes are compared.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from models import qwen3_moe
from models.blocks import Constant, Distribution, Flops, Normal, SwiGLU
from models.moe import Experts, MoE, Router


@dataclass(frozen=True)
class Config(qwen3_moe.Config):
    score: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    shared_dim: int = 0  # of the shared expert; 0: none


_PLAIN = Config(64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, expert_dim=32, n_experts=8, top_k=2, vocab_size=512)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
    "shared": dataclasses.replace(_PLAIN, score="sigmoid", scale=1.5, bias=True, shared_dim=48),
    "grouped": dataclasses.replace(_PLAIN, score="sigmoid", groups=4, top_groups=2, top_k=3, normalised=False),
    "three": dataclasses.replace(_PLAIN, n_experts=3),  # 2 ranks split each expert
    "large": dataclasses.replace(_PLAIN, score="sigmoid", bias=True, shared_dim=48, vocab_size=4096),  # default tokenizer
}


class Model(qwen3_moe.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        c = config
        for layer in self.layers.values():
            router = Router(
                c.dim, c.n_experts, c.top_k, c.score, c.normalised, c.scale, c.groups, c.top_groups, c.bias
            )  # fmt: skip
            shared = SwiGLU(c.dim, c.shared_dim) if c.shared_dim else None
            layer.ffn = MoE(router, Experts(c.n_experts, c.dim, c.expert_dim), shared)


def sharding(config: Config) -> dict[str, str]:
    shared = {
        "layers.*.ffn.shared_input": "sequence",
        "layers.*.ffn.shared.w[13]": "column",
        "layers.*.ffn.shared.w2": "row",
    }
    return qwen3_moe.sharding(config) | (shared if config.shared_dim else {})


def initial(config: Config) -> dict[str, Distribution]:
    bias = {"layers.*.ffn.router.bias": Constant(0.5)} if config.bias else {}
    return {
        "embed.weight": Normal(1.0),
        "*norm.weight": Constant(1.0),
        "layers.*.ffn.router.weight": Normal(0.3),
        **bias,
        "*": Normal(0.1),
    }


def flops(config: Config, seq_len: int) -> Flops:
    chosen, shared = qwen3_moe.flops(config, seq_len), 18 * config.n_layers * config.dim * config.shared_dim
    return Flops(chosen.causal + shared, chosen.palm + shared)
