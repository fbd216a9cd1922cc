"""Mixtures of experts: a router sends each token to a few of many feed-forward layers, and no token is dropped.

Rows of tokens are sorted by their expert, and each product multiplies every expert's rows by its own matrix. That product is
one operation of PyTorch's dispatcher: the number of rows of all experts together is fixed, so a block compiles as one graph,
and routing never changes a shape. Experts know no tensor parallelism: sequence parallelism gives each rank its own tokens.
"""

from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from models.blocks import SwiGLU, local_weight

# ------------------------------------------------------------------------------------------------------ grouped products

# `ends` (experts,) int32 says which rows are whose: expert e has the rows from ends[e - 1], or 0, up to ends[e].


@torch.library.custom_op("titanlite::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """The rows of each expert times its matrix, or times its transpose, as in nn.Linear.

    rows: (n, in), sorted by expert; weights: (experts, in, out), or transposed (experts, out, in) -> (n, out).
    """
    matrices = weights.transpose(1, 2) if transposed else weights
    if _has_kernel(rows, weights):
        return F.grouped_mm(rows, matrices, offs=ends)
    result = rows.new_empty(len(rows), matrices.shape[2])
    for matrix, (first, last) in zip(matrices, _runs(ends), strict=True):
        torch.mm(rows[first:last], matrix, out=result[first:last])
    return result


@torch.library.custom_op("titanlite::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each expert, the product of its rows of left (n, a), transposed, and of right (n, b) -> (experts, a, b).

    It is 0 for an expert without rows.
    """
    if _has_kernel(left, right):
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        # nothing is multiplied for an expert without rows, and its matrix need not have been written
        return F.grouped_mm(left.t(), right, offs=ends).masked_fill_((sizes == 0)[:, None, None], 0)
    result = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for matrix, (first, last) in zip(result, _runs(ends), strict=True):
        torch.mm(left[first:last].t(), right[first:last], out=matrix)
    return result


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these: in bfloat16 on CUDA, every row at a multiple of 16 bytes."""
    aligned = all(size % 8 == 0 for size in (*left.shape[1:], *right.shape[1:]))
    return left.is_cuda and left.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def _runs(ends: Tensor) -> Any:
    """(first, last) of the rows of each expert, on the host."""
    return pairwise([0, *ends.tolist()])


@grouped_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1 if transposed else 2])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, ends, ctx.transposed = inputs
    ctx.save_for_backward(rows, weights, ends)


def _backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    slopes = slopes.contiguous()
    to_rows = grouped_product(slopes, weights, ends, not ctx.transposed) if ctx.needs_input_grad[0] else None
    to_weights = None
    if ctx.needs_input_grad[1]:
        to_weights = grouped_outer(slopes, rows, ends) if ctx.transposed else grouped_outer(rows, slopes, ends)
    return to_rows, to_weights, None, None


grouped_product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.titanlite.grouped_product)
def _product_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weights[1] * weights[2]  # shapes: each row meets one matrix


@register_flop_formula(torch.ops.titanlite.grouped_outer)
def _outer_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


# What selective checkpointing by operation keeps. The choice is kept because a recomputation that rounds differently could
# send a token to another expert.
KEEP = (
    torch.ops.titanlite.grouped_product.default,
    torch.ops.aten.topk.default,
    torch.ops.aten.sort.stable,
)


class _Reordered(torch.autograd.Function):
    """Row `order[i] // copies` of x as row i: a permutation of its rows, each of which occurs `copies` times.

    inverse: of the permutation. Autograd would scatter the slopes one by one; a permutation can gather them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return slopes[inverse].unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


# ---------------------------------------------------------------------------------------------------------------- modules


def check_choice(n_experts: int, top_k: int, groups: int = 1, top_groups: int = 1) -> None:
    """Raises ValueError for a choice that a `Router` cannot make."""
    if not 0 < top_k <= n_experts:
        raise ValueError(f"top_k = {top_k}: must be between 1 and n_experts = {n_experts}")
    if n_experts % groups or not 0 < top_groups <= groups:
        raise ValueError(f"groups = {groups}: must divide n_experts = {n_experts}, and be at least top_groups = {top_groups}")
    if groups > 1 and (n_experts // groups < 2 or top_k > top_groups * (n_experts // groups)):
        raise ValueError(f"groups = {groups}: {top_groups} of them must hold top_k = {top_k} experts, and each at least 2")


def experts_from_hf(json: dict[str, Any]) -> int:
    """The number of experts in a Hugging Face config.json; transformers 5 writes and reads two names. Raises ValueError."""
    found: list[int] = [json[key] for key in ("num_experts", "num_local_experts") if json.get(key) is not None]
    if len(set(found)) != 1:
        raise ValueError(f"num_experts, or num_local_experts, must be one number, and is {found or 'missing'}")
    return found[0]


class Router(nn.Module):
    """Chooses `top_k` experts for each token, and the weights of their results.

    score: of the logits, a softmax over all experts or a sigmoid of each. normalised: the weights of a token add up to 1.
    scale: a factor of the weights. groups, top_groups: the experts are in so many groups of equal size, and only those in the
    `top_groups` best groups, by the sum of their two best scores, can be chosen. bias: a buffer that is added to the scores for
    the choice alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        n_experts: int,
        top_k: int,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalised: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        self.top_k, self.score, self.normalised, self.scale = top_k, score, normalised, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.register_buffer("bias", torch.empty(n_experts) if bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (tokens, dim) -> two of (tokens, top_k)
        """The weights, float32, and the numbers of the experts. In float32, since a rounded score can change the choice."""
        logits = F.linear(x.float(), local_weight(self.weight).float())
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        chosen = self.choose(scores.detach())
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.scale, chosen

    def choose(self, scores: Tensor) -> Tensor:  # (tokens, experts) -> (tokens, top_k)
        """The numbers of the experts with the best scores."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups > 1:
            grouped = scores.unflatten(1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1).indices
            admitted = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0) > 0  # (tokens, groups)
            scores = grouped.masked_fill(~admitted[..., None], -torch.inf).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices


class Experts(nn.Module):
    """The SwiGLU of every expert; w1, w3: (experts, hidden, dim); w2: (experts, dim, hidden)."""

    def __init__(self, n_experts: int, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden, dim))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:  # (n, dim), sorted by expert -> (n, dim)
        w1, w2, w3 = local_weight(self.w1), local_weight(self.w2), local_weight(self.w3)
        hidden = F.silu(grouped_product(rows, w1, ends, True)) * grouped_product(rows, w3, ends, True)
        return grouped_product(hidden, w2, ends, True)


class MoE(nn.Module):
    """A feed-forward layer of experts; `shared` is one that every token uses in addition."""

    def __init__(self, router: Router, experts: Experts, shared: SwiGLU | None = None):
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.shared_input = nn.Identity() if shared is not None else None  # tensor parallelism gathers the sequence here

    def numbers_of_a_token(self) -> int:
        """How many numbers of router and experts each token is multiplied by."""
        stacks = sum(parameter.numel() for parameter in self.experts.parameters())
        return self.router.weight.numel() + stacks * self.router.top_k // self.experts.w1.shape[0]

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim) -> the same
        tokens, copies = x.flatten(0, 1), self.router.top_k
        weights, chosen = self.router(tokens)
        experts, order = chosen.flatten().sort(stable=True)  # each token occurs `copies` times
        places = torch.arange(len(order), device=x.device)
        inverse = torch.empty_like(order).scatter(0, order, places)
        numbers = torch.arange(self.experts.w1.shape[0], device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        rows = self.experts(_Reordered.apply(tokens, order, inverse, copies), ends)
        results = _Reordered.apply(rows, inverse, order, 1).unflatten(0, (-1, copies))
        mixed = (results * weights[..., None].type_as(results)).sum(dim=1).view_as(x)
        return mixed if self.shared is None or self.shared_input is None else mixed + self.shared(self.shared_input(x))
