"""A dense MoE model whose routers read the routing of the previous layer: the shares of its experts."""

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo, with_mask
from models.blocks import Distribution, Flops, Normal, local_weight
from models.rope import rotation
from tests.forks.right import dense_mixture
from tests.forks.right.dense_mixture import EXPERTS
from tests.forks.right.dense_mixture import sharding as sharding_of_mixture
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Mixture(dense_mixture.Mixture):
    def __init__(self, config: Config, first: bool):
        super().__init__(config)
        self.before = None if first else nn.Parameter(torch.empty(EXPERTS, EXPERTS))

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = self.router(x)  # (batch, this rank's slice of the sequence, experts)
        if before is not None and self.before is not None:
            scores = scores + before.type_as(x) @ local_weight(self.before)
        shares = scores.softmax(dim=-1, dtype=torch.float32)
        gathered, parts = self.expert_input(x), shares.type_as(x).split(1, dim=-1)
        return sum(expert(gathered) * share for expert, share in zip(self.experts, parts, strict=True)), shares


class Block(llama3.Block):
    def __init__(self, config: Config, first: bool):
        super().__init__(config)
        self.ffn = Mixture(config, first)

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rope, seq)
        mixed, shares = self.ffn(self.ffn_norm(x), before)
        return x + mixed, shares


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): Block(config, first=i == 0) for i in range(config.n_layers)})

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        c, shares = self.config, None
        x, seq = self.embed(x), with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x, shares = layer(x, rope, seq, shares)
        return x


def sharding(config: Config) -> dict[str, str]:
    return {"layers.*.ffn": "replicate", **sharding_of_mixture(config)}


def initial(config: Config) -> dict[str, Distribution]:
    return {"layers.*.ffn.before": Normal(0.5), **dense_mixture.initial(config)}


def flops(config: Config, seq_len: int) -> Flops:
    more = 6 * (config.n_layers - 1) * EXPERTS**2
    return Flops(*(count + more for count in dense_mixture.flops(config, seq_len)))
