"""A dense MoE layer: a router weights the results of several feed-forward layers for each token."""

import torch
from torch import Tensor, nn

from models import llama3
from models.blocks import Distribution, Flops, Normal, SwiGLU
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

EXPERTS = 3


class Mixture(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.router = nn.Linear(config.dim, EXPERTS, bias=False)
        self.expert_input = nn.Identity()
        self.experts = nn.ModuleList(SwiGLU(config.dim, config.ffn_dim) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:  # this rank's slice of the sequence -> the same
        shares = self.router(x).softmax(dim=-1, dtype=torch.float32).type_as(x)  # (batch, seq, experts)
        gathered = self.expert_input(x)  # once for all experts, each of which returns this rank's slice
        return sum(expert(gathered) * share for expert, share in zip(self.experts, shares.split(1, dim=-1), strict=True))


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn = Mixture(config)


def sharding(config: Config) -> dict[str, str]:
    of_llama = {pattern: style for pattern, style in llama3.sharding(config).items() if ".ffn" not in pattern}
    return {
        **of_llama,
        "layers.*.ffn_norm": "replicate",  # this rank's slice, which the router reads
        "layers.*.ffn.router": "replicate",
        "layers.*.ffn.expert_input": "sequence",
        "layers.*.ffn.experts.*.w[13]": "column",
        "layers.*.ffn.experts.*.w2": "row",
    }


def initial(config: Config) -> dict[str, Distribution]:
    of_llama = llama3.initial(config)
    residual = of_llama.pop("layers.*.ffn.w2.weight")
    return {"layers.*.ffn.router.weight": Normal(0.1), "layers.*.ffn.experts.*.w2.weight": residual, **of_llama}


def flops(config: Config, seq_len: int) -> Flops:
    c, of_llama = config, llama3.flops(config, seq_len)
    more = 6 * c.n_layers * c.dim * ((EXPERTS - 1) * 3 * c.ffn_dim + EXPERTS)
    return Flops(of_llama.causal + more, of_llama.palm + more)
