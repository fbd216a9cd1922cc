"""What several model families share: normalization, rotation, SwiGLU. See also rope.py, attention.py and head.py.

Tensors have shape (batch, seq, ...). Under tensor parallelism, a module's inputs are plain local tensors (this rank's heads,
this rank's slice of the tokens) and its parameters are DTensors. `local_weight` converts a DTensor for local arithmetic.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

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
    """FLOPs per token of a decoder: 6 per parameter of a matmul, 12 H Q T per layer of attention (PaLM, appendix B).

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


def gathered_like(x: Tensor, like: Tensor) -> Tensor:
    """A plain tensor as a gathered sequence, if `like` is one: what `whole` undoes. x must be equal on all ranks."""
    return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False) if isinstance(like, DTensor) else x


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last dimension (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        weight = local_weight(self.weight)
        return F.rms_norm(x, weight.shape, weight, self.eps)


# ----------------------------------------------------------------------------------------------------------- positions


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
