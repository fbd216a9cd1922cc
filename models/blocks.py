"""What several model families share: normalisation, rotary positions, SwiGLU. See also attention.py and head.py.

Tensors have shape (batch, seq, ...). Under tensor parallelism, a module's inputs are plain local tensors (this rank's heads,
this rank's slice of the sequence) and its parameters are DTensors. `local_weight` converts a DTensor for local arithmetic.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


class Normal(NamedTuple):
    """Initial distribution: normal with mean 0, truncated at `cutoff` deviations; `std` is the deviation before truncation."""

    std: float
    cutoff: float = 3.0


class Uniform(NamedTuple):
    """Initial distribution: uniform between `low` and `high`."""

    low: float
    high: float


class Constant(NamedTuple):
    """Initial distribution: every element equals `value`."""

    value: float


class Identity(NamedTuple):
    """Initial values of a matrix, or of each matrix of the last two dimensions: `scale` on the diagonal, 0 elsewhere."""

    scale: float = 1.0


class Computed(NamedTuple):
    """Initial values that a function computes, such as the logarithms of Mamba's decays: `Computed(lambda index, shape: ...)`.

    index: one int64 tensor for each dimension of the parameter, all of one shape, which is also that of the result. shape: of
    the whole parameter. Each rank passes the positions of its own shard, so a value must follow from its own index alone. The
    function runs on the CPU; give it float64, index[0].double(), so that the rounding to float32 is the same everywhere.
    """

    values: Callable[[tuple[Tensor, ...], tuple[int, ...]], Tensor]


Distribution = Normal | Uniform | Constant | Identity | Computed


class Flops(NamedTuple):
    """Floating-point operations of training per token: forward and backward pass, without recomputation."""

    causal: float  # attention counts only the pairs that the mask admits, on average half the sequence per token
    palm: float  # attention counts all pairs (Chowdhery et al., arXiv:2204.02311, appendix B)


def transformer_flops(matmul_parameters: int, heads_dim: int, seq_len: int, windows: Iterable[int | None]) -> Flops:
    """FLOPs per token of a decoder: 6 per parameter of a matrix product, 12 H Q T per layer of attention (PaLM, appendix B).

    heads_dim: total width of the query heads, H Q. windows: the attention window of each layer in tokens; None: no window.
    """
    attention, dense = 12 * heads_dim, 6 * matmul_parameters
    widths = [min(window or seq_len, seq_len) for window in windows]
    # the first `width` tokens attend to 1, 2, ..., width tokens, each later one to `width`
    attended = sum(width * (2 * seq_len - width + 1) / (2 * seq_len) for width in widths)
    return Flops(causal=dense + attention * attended, palm=dense + attention * seq_len * len(widths))


def local_weight(weight: Tensor) -> Tensor:
    """A parameter as a plain tensor, for local arithmetic under tensor parallelism: all of it, or this rank's part if split.

    Each rank processes its own tokens or heads, so a replicated weight's gradient is the sum of the ranks' gradients (Partial).
    """
    if isinstance(weight, DTensor):
        return weight.to_local(grad_placements=[Partial() if each.is_replicate() else each for each in weight.placements])
    return weight


def whole(x: Tensor) -> Tensor:
    """The gathered sequence that a "sequence" module returns, as a plain tensor (batch, seq, ...), without communication.

    Use it for this rank's heads or features only: its gradient is the sum of the ranks' gradients (Partial), which would count
    what all ranks compute alike once for each rank.
    """
    if isinstance(x, DTensor):
        assert all(placement.is_replicate() for placement in x.placements), "whole needs what a 'sequence' module returns"
        return x.to_local(grad_placements=[Partial()])
    return x


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        weight = local_weight(self.weight)
        return F.rms_norm(x, weight.shape, weight, self.eps)


# ----------------------------------------------------------------------------------------------------------- positions


class RopeScaling(NamedTuple):
    """Llama 3.1's extension of rotary wavelengths to longer contexts (Llama 3, arXiv:2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def hf_rope(json: dict[str, Any]) -> tuple[dict[str, Any], str, float]:
    """(table of RoPE, its type, its base) in a config.json of Hugging Face, with their defaults; not for Gemma 3.

    As in transformers, rope_scaling, the older name, replaces rope_parameters, and a base in the table the one outside of it.
    """
    table = json.get("rope_scaling") or json.get("rope_parameters") or {}
    outside = json.get("rope_theta", 10_000.0)
    return table, table.get("rope_type", table.get("type", "default")), float(table.get("rope_theta", outside))


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angular frequency of each pair of head dimensions: (head_dim / 2,) float32 (Su et al., arXiv:2104.09864).

    `scaling` multiplies wavelengths above original_max_positions / low_freq_factor by `factor`, keeps those below
    original_max_positions / high_freq_factor, and interpolates the frequency between the two.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # rotations within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (batch, seq): two float32 tensors (batch, seq, 1, head_dim), both halves equal."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (batch, seq, heads, head_dim). Dimension i pairs with i + head_dim / 2, as in Hugging Face's layout."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


def positions_in_documents(documents: Tensor) -> Tensor:
    """The position of each token in its document, from 0: int64 (batch, seq). Tokens of one document are contiguous."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(first, index, 0).cummax(dim=1).values


# ------------------------------------------------------------------------------------------------------- feed-forward


class SwiGLU(nn.Module):
    """Gated feed-forward layer w2(silu(w1 x) * w3 x) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim) -> (batch, seq, dim)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
