"""What several model families share: normalisation, rotary positions, SwiGLU; attention.py and head.py have the rest.

Tensors are (batch, seq, ...). Under tensor parallelism a module sees plain local tensors (its own heads, its own slice of
the sequence) while its parameters are DTensors; `local_weight` is the one bridge between the two.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


class Normal(NamedTuple):
    """Initial distribution: normal with mean 0, cut off at `cutoff` deviations; `std` is that of the uncut one."""

    std: float
    cutoff: float = 3.0


class Constant(NamedTuple):
    """Initial distribution: one value everywhere."""

    value: float


class Flops(NamedTuple):
    """Floating-point operations that training spends on one token, forward and backward, without recomputation."""

    causal: float  # attention counted over the positions that a token may see, on average half the sequence
    palm: float  # attention counted over the whole sequence (Chowdhery et al., arXiv:2204.02311, appendix B)


def transformer_flops(matmul_parameters: int, heads_dim: int, seq_len: int, windows: Iterable[int | None]) -> Flops:
    """FLOPs a token of a decoder: 6 for every parameter that is multiplied, 12 H Q T a layer for attention (PaLM, appendix B).

    heads_dim: the width of all query heads together, H Q. windows: how far each layer's attention looks; None: all the way.
    """
    attention, dense = 12 * heads_dim, 6 * matmul_parameters
    reaches = [min(window or seq_len, seq_len) for window in windows]
    # the first `reach` tokens see 1, 2, ... reach tokens, all later ones `reach`
    seen = sum(reach * (2 * seq_len - reach + 1) / (2 * seq_len) for reach in reaches)
    return Flops(causal=dense + attention * seen, palm=dense + attention * seq_len * len(reaches))


def local_weight(weight: Tensor) -> Tensor:
    """The whole of a weight that every tensor-parallel rank holds, as a plain tensor for local arithmetic.

    Each rank sees other tokens or other heads, so its gradient is one summand of the weight's gradient.
    """
    if isinstance(weight, DTensor):
        assert all(place.is_replicate() for place in weight.placements), "a split weight is not the same for all ranks"
        return weight.to_local(grad_placements=[Partial()])
    return weight


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
    """Llama 3.1's stretching of rotary wavelengths beyond the original context (Llama 3, arXiv:2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angular frequencies of the head's pairs of dimensions, (head_dim / 2,) float32 (Su et al., arXiv:2104.09864).

    With `scaling`, wavelengths above original / low_freq_factor are stretched by `factor`, those below original /
    high_freq_factor are kept, and between the two the frequency is interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns in the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of (batch, seq) positions: two (batch, seq, 1, head_dim) float32 tensors, halves repeated."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (batch, seq, heads, head_dim); dimension i pairs with i + head_dim / 2, Hugging Face's layout."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


def positions_in_documents(documents: Tensor) -> Tensor:
    """The place of each token in its document, from 0; documents (batch, seq), equal numbers side by side -> int64."""
    place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return place - torch.where(first, place, 0).cummax(dim=1).values


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
