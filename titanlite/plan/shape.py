"""What the model of time knows of a model: its matrices, how tensor parallelism splits them, and the FLOPs of attention.

A forward pass without memory shows how often each matrix is used and how many experts a token has; a fork needs no names.
"""

from collections import Counter
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from models.attention import AttentionCore
from models.decoder import Decoder
from models.moe import Experts
from titanlite.plan.layers import run_kinds
from titanlite.registry.family import Family

_ENOUGH = 4096  # tokens to see what a block does; more take longer to trace


class Matrix(NamedTuple):
    """A weight that multiplies every token. split: the style of tensor parallelism, "column", "row" or "" for none."""

    rows: int  # results of a token
    columns: int
    split: str
    times: int = 1  # in a forward pass; a block that runs twice uses its matrices twice


class ExpertShape(NamedTuple):
    """The experts of an MoE layer, each with three matrices."""

    number: int
    top_k: int  # experts of a token
    hidden: int


class Layer(NamedTuple):
    """A block. keys: numbers of a token's keys and values, which context parallelism gathers."""

    matrices: tuple[Matrix, ...]
    experts: ExpertShape | None
    keys: int

    @property
    def dense_parameters(self) -> int:
        return sum(each.rows * each.columns for each in self.matrices)

    def expert_parameters(self, dim: int) -> int:
        return 3 * dim * self.experts.hidden * self.experts.number if self.experts else 0

    def multiplied(self, dim: int) -> int:
        """Parameters by which a token is multiplied."""
        of_experts = 3 * dim * self.experts.hidden * self.experts.top_k if self.experts else 0
        return of_experts + sum(each.times * each.rows * each.columns for each in self.matrices)

    def recomputed(self, dim: int, mode: str) -> float:
        """The share of its matmuls that the backward pass computes again.

        "selective" keeps every second one and those of experts. "full" stops before the last one, whose result nothing needs.
        """
        dense = [each.times * each.rows * each.columns for each in self.matrices]
        whole = self.multiplied(dim)
        experts = whole - sum(dense)
        last = experts / 3 or dim * next((each.columns for each in reversed(self.matrices) if each.rows == dim), 0)
        again = {"none": 0.0, "selective": sum(dense[1::2]), "full": whole - last}[mode]
        return again / whole if whole else 0.0


class Shape(NamedTuple):
    """A whole model. attention, others: FLOPs, forward and backward, of a token in all layers.

    others: of matmuls that no nn.Linear and no Experts does, by the family's formula.
    """

    layers: tuple[tuple[Layer, int], ...]  # each kind of layer, and how many there are
    dim: int
    vocab: int
    embeddings: int  # parameters of embedding and head's projection
    attention: float
    others: float = 0.0

    @property
    def depth(self) -> int:
        return sum(often for _, often in self.layers)

    @property
    def kind(self) -> str:
        """Of a prediction's error: "dense" or "MoE"."""
        return "MoE" if any(layer.experts for layer, _ in self.layers) else "dense"

    @classmethod
    def of(cls, family: Family, model: Decoder, seq_len: int) -> "Shape":
        """model: whole, on the meta device, for nothing else."""
        assert model.head is not None
        vocab, dim = model.head.output.weight.shape
        embeddings = sum(each.numel() for each in {*model.embed.parameters(), model.head.output.weight})
        styles: dict[str, str] = family.module.sharding(family.config)
        _, uses = run_kinds(model, min(seq_len, _ENOUGH))
        layers = [_layer(f"layers.{name}", layer, styles, uses[name]) for name, layer in model.layers.items()]
        at, alone = (family.module.flops(family.config, tokens).causal for tokens in (seq_len, 1))
        known = vocab * dim + sum(layer.multiplied(dim) for layer in layers)
        return cls(tuple(Counter(layers).items()), dim, vocab, embeddings, at - alone, max(0.0, alone - 6 * known))


def _layer(prefix: str, layer: nn.Module, styles: dict[str, str], uses: Counter[str]) -> Layer:
    matrices, keys, experts = [], 0, None
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            style = next((style for pattern, style in styles.items() if fnmatchcase(f"{prefix}.{name}", pattern)), "")
            split = style if style in ("column", "row") else ""
            matrices.append(Matrix(module.out_features, module.in_features, split, uses[name]))
        elif isinstance(module, AttentionCore):
            keys += module.n_kv_heads * (module.head_dim + module.value_dim) * uses[name]
        elif isinstance(module, Experts) and uses[name]:
            experts = ExpertShape(module.n_experts, uses[name], module.w1.shape[1])
    return Layer(tuple(matrices), experts, keys)
