"""What the model of time knows of a model: its matrices, how tensor parallelism splits them, and the FLOPs of attention."""

from collections import Counter
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from models.decoder import Decoder
from models.moe import experts_of, routers_of
from titanlite.registry.family import Family


class Matrix(NamedTuple):
    """A weight that multiplies every token. split: the style of tensor parallelism, "column", "row" or "" for none."""

    rows: int  # results of a token
    columns: int
    split: str


class ExpertShape(NamedTuple):
    """The experts of an MoE layer, each with three matrices."""

    number: int
    top_k: int  # experts of a token
    hidden: int


class Layer(NamedTuple):
    """A block. keys: the keys and values of a token, in numbers."""

    matrices: tuple[Matrix, ...]
    experts: ExpertShape | None
    keys: int

    @property
    def dense_parameters(self) -> int:
        return sum(each.rows * each.columns for each in self.matrices)

    def expert_parameters(self, dim: int) -> int:
        return 3 * dim * self.experts.hidden * self.experts.number if self.experts else 0

    def recomputed(self, dim: int, mode: str) -> float:
        """The share of its matmuls that the backward pass computes again.

        "selective" keeps every second one and those of experts. "full" stops before the last one, whose result nothing needs.
        """
        dense = [each.rows * each.columns for each in self.matrices]
        experts = 3 * dim * self.experts.hidden * self.experts.top_k if self.experts else 0
        last = experts / 3 or dim * next((each.columns for each in reversed(self.matrices) if each.rows == dim), 0)
        again = {"none": 0.0, "selective": sum(dense[1::2]), "full": sum(dense) + experts - last}[mode]
        return again / (sum(dense) + experts)


class Shape(NamedTuple):
    """A whole model. attention: FLOPs of attention, forward and backward, of a token in all layers."""

    layers: tuple[tuple[Layer, int], ...]  # each kind of layer, and how many there are
    dim: int
    vocab: int
    tied: bool
    attention: float

    @property
    def depth(self) -> int:
        return sum(often for _, often in self.layers)

    @property
    def kind(self) -> str:
        """Of a prediction's error: "dense" or "MoE"."""
        return "MoE" if any(layer.experts for layer, _ in self.layers) else "dense"

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return self.dim * self.vocab * (1 if self.tied else 2)

    @classmethod
    def of(cls, family: Family, model: Decoder, seq_len: int) -> "Shape":
        """model: on the meta device, whole."""
        styles: dict[str, str] = family.module.sharding(family.config)
        kinds = Counter(_layer(f"layers.{name}", layer, styles) for name, layer in model.layers.items())
        embed = model.get_submodule("embed")
        assert isinstance(embed, nn.Embedding) and model.head is not None
        at, alone = (family.module.flops(family.config, tokens).causal for tokens in (seq_len, 1))
        tied = model.head.output.weight is embed.weight
        return cls(tuple(kinds.items()), embed.embedding_dim, embed.num_embeddings, tied, at - alone)


def _layer(prefix: str, layer: nn.Module, styles: dict[str, str]) -> Layer:
    matrices, keys = [], 0
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            style = next((style for pattern, style in styles.items() if fnmatchcase(f"{prefix}.{name}", pattern)), "")
            matrices.append(Matrix(module.out_features, module.in_features, style if style in ("column", "row") else ""))
            keys += module.out_features if name.rpartition(".")[2] in ("wk", "wv", "wkv_b") else 0
    experts = None
    if found := experts_of(layer):
        number, hidden, _ = found[0].w1.shape
        experts = ExpertShape(number, routers_of(layer)[0].top_k, hidden)
    return Layer(tuple(matrices), experts, keys)
