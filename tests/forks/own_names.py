"""The tiny Llama with an own embedding (factored, arXiv:1909.11942), and MoE layers whose parts have other names than ours."""

from torch import Tensor, nn

from models import llama3
from models.blocks import Constant, Distribution, Flops, Normal
from models.moe import Experts, Router
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

EXPERTS, TOP_K, FACTOR = 8, 2, 32


class Embedding(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, FACTOR)
        self.up = nn.Linear(FACTOR, config.dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.up(self.table(tokens))


class Sparse(nn.Module):
    def __init__(self, config: Config, bias: bool):
        super().__init__()
        self.gate = Router(config.dim, EXPERTS, TOP_K, bias=bias)
        self.bank = Experts(EXPERTS, config.dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        return self.bank(x.flatten(0, 1), weights, chosen).view_as(x)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.embed = Embedding(config)
        for number, layer in enumerate(self.layers.values()):
            layer.ffn = Sparse(config, bias=number > 0)  # the first layer's router has no bias


def sharding(config: Config) -> dict[str, str]:
    of_llama = {name: style for name, style in llama3.sharding(config).items() if ".ffn" not in name and name != "embed"}
    return {
        "embed.table": "vocab",
        "embed.up": "replicate",
        **of_llama,
        "layers.*.ffn_norm": "replicate",
        "layers.*.ffn.gate": "replicate",
        "layers.*.ffn.bank": "experts",
    }


def initial(config: Config) -> dict[str, Distribution]:
    return {"*norm.weight": Constant(1.0), "*.gate.bias": Constant(0.0), "embed.*": Normal(1.0), "*": Normal(0.02)}


def flops(config: Config, seq_len: int) -> Flops:
    c, of_llama = config, llama3.flops(config, seq_len)
    more = 6 * c.dim * (FACTOR + c.n_layers * ((TOP_K - 1) * 3 * c.ffn_dim + EXPERTS))
    return Flops(of_llama.causal + more, of_llama.palm + more)
