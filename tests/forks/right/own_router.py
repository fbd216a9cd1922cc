"""An MoE layer with the fork's own router: a linear layer and a softmax, as in many papers."""

import torch
from torch import Tensor, nn

from models import llama3
from models.blocks import Distribution, Flops, Normal
from models.moe import Experts
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

EXPERTS, TOP_K = 8, 1  # as in the Switch Transformer (arXiv:2101.03961)


class RoutedExperts(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.router = nn.Linear(config.dim, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, config.dim, config.ffn_dim)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and numbers of the experts of each token, (tokens, TOP_K) each. x: (tokens, dim)."""
        return self.router(x).softmax(dim=-1, dtype=torch.float32).topk(TOP_K)

    def forward(self, x: Tensor) -> Tensor:  # this rank's slice of the tokens -> the same
        tokens = x.flatten(0, 1)
        weights, chosen = self.route(tokens)
        return self.experts(tokens, weights, chosen).view_as(x)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn = RoutedExperts(config)


def sharding(config: Config) -> dict[str, str]:
    of_llama = {pattern: style for pattern, style in llama3.sharding(config).items() if ".ffn" not in pattern}
    return {
        **of_llama,
        "layers.*.ffn_norm": "replicate",  # router and experts read this rank's slice of the tokens
        "layers.*.ffn.router": "replicate",
        "layers.*.ffn.experts": "experts",
    }


def initial(config: Config) -> dict[str, Distribution]:
    of_llama = llama3.initial(config)
    residual = of_llama.pop("layers.*.ffn.w2.weight")
    return {"layers.*.ffn.router.weight": Normal(0.1), "layers.*.ffn.experts.w2": residual, **of_llama}


def flops(config: Config, seq_len: int) -> Flops:
    c, of_llama = config, llama3.flops(config, seq_len)
    more = 6 * c.n_layers * c.dim * ((TOP_K - 1) * 3 * c.ffn_dim + EXPERTS)
    return Flops(of_llama.causal + more, of_llama.palm + more)
