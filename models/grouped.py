"""Grouped matmuls: rows that are sorted by expert, times one matrix for each expert, as one operation of PyTorch's dispatcher.

The number of rows of all experts together is fixed, so that routing never changes a shape, and nothing recompiles.
`ACTIVATIONS` are what experts compute between their matmuls.

`ends` (experts,) int32: expert e has the rows from ends[e - 1], or 0, up to ends[e]. Rows after the last end belong to no
expert, and those of the result are unwritten.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.torch_private import cast_result, onednn_linear


@torch.library.custom_op("titanlite::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor, transposed: bool, biases: Tensor | None) -> Tensor:
    """The rows of each expert times its matrix, or times its transpose, as in nn.Linear, plus its bias.

    rows: (n, in), sorted by expert; weights: (experts, in, out), or transposed (experts, out, in); biases: (experts, out)
    -> (n, out).
    """
    matrices = weights.transpose(1, 2) if transposed else weights
    if _has_kernel(rows, weights):
        result = F.grouped_mm(rows, matrices, offs=ends)
        if biases is not None:
            experts = torch.searchsorted(ends, torch.arange(len(rows), device=ends.device, dtype=ends.dtype), right=True)
            result += biases[experts.clamp(max=len(ends) - 1)]
        return result
    result = rows.new_empty(len(rows), matrices.shape[2])
    for expert, (matrix, (first, last)) in enumerate(zip(matrices, _runs(ends), strict=True)):
        _multiply(rows[first:last], matrix, result[first:last])
        if biases is not None:
            result[first:last] += biases[expert]
    return result


@torch.library.custom_op("titanlite::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each expert, the product of its rows of left (n, a), transposed, and of right (n, b) -> (experts, a, b).

    It is 0 for an expert without rows.
    """
    if _has_kernel(left, right):
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        # nothing is multiplied for an expert without rows, and its matrix need not have been written: on Blackwell it is not
        # (PyTorch issue 172439)
        return F.grouped_mm(left.t(), right, offs=ends).masked_fill_((sizes == 0)[:, None, None], 0)
    result = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for matrix, (first, last) in zip(result, _runs(ends), strict=True):
        _multiply(left[first:last].t(), right[first:last], matrix)
    return result


def grouped_sum(rows: Tensor, ends: Tensor) -> Tensor:
    """The sum of each expert's rows (n, a) -> (experts, a), summed in float32 by a matmul with ones."""
    ones = rows.new_ones(len(rows), 8)  # as wide as the alignment of PyTorch's kernel
    return grouped_outer(rows, ones, ends)[..., 0].contiguous()


@torch.library.custom_op("titanlite::mixed_biases", mutates_args=())
def mixed_biases(mix: Tensor, biases: Tensor) -> Tensor:
    """The weighted sum of the biases of each token's experts, (tokens, dim).

    mix: (tokens, experts), 0 for experts that a token has not chosen; biases: (experts, dim). An operation of its own, so that
    this matmul with zeros counts no FLOPs, and selective checkpointing does not keep its result.
    """
    return mix @ biases


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes these: in bfloat16 on CUDA, every row at a multiple of 16 bytes, and not 0 rows.

    Without rows, the gradient of the matrices is a sum over an empty dimension, whose strides its checks refuse (PyTorch pull
    request 192497); the loop makes zeros.
    """
    aligned = all(size % 8 == 0 for size in (*left.shape[1:], *right.shape[1:]))
    return left.is_cuda and left.dtype == torch.bfloat16 and aligned and len(left) > 0 and hasattr(F, "grouped_mm")


def _is_amd(description: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor is AMD's, by the first lines of Linux's description."""
    try:
        with description.open("rb", buffering=0) as file:
            return b"AuthenticAMD" in file.read(256)
    except OSError:
        return False


# PyTorch multiplies float32 on x86 by MKL, which uses AVX-512 on Intel's processors only. oneDNN uses it on all: 200 GFLOP/s on
# a core of AMD's Zen 5 instead of 95, but on one of a Xeon 39 to 106 instead of 104 to 122 (benchmarks/NOTES.md).
_BY_ONEDNN = _is_amd() and torch.backends.mkldnn.is_available()
_LARGE = 2**21  # multiplications; oneDNN is faster from here on, although a call takes 10 us more
_AT_A_TIME = 256  # rows that oneDNN returns: few, so that they are copied within the cache


def _multiply(left: Tensor, right: Tensor, result: Tensor) -> None:
    """Writes the product of two matrices to `result`."""
    large = left.shape[0] * right.numel() >= _LARGE
    if not (_BY_ONEDNN and large and left.dtype == torch.float32 and left.device.type == "cpu"):
        torch.mm(left, right, out=result)
        return
    for part, rows in zip(result.split(_AT_A_TIME), left.split(_AT_A_TIME), strict=True):
        part.copy_(onednn_linear(rows, right.t()))


def _runs(ends: Tensor) -> Any:
    """(first, last) of the rows of each expert, on the host."""
    return pairwise([0, *ends.tolist()])


@grouped_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor, transposed: bool, biases: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1 if transposed else 2])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, ends, ctx.transposed, _ = inputs
    ctx.save_for_backward(rows, weights, ends)


def _backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    gradients = gradients.contiguous()
    to_rows = grouped_product(gradients, weights, ends, not ctx.transposed, None) if ctx.needs_input_grad[0] else None
    to_weights = None
    if ctx.needs_input_grad[1]:
        to_weights = grouped_outer(gradients, rows, ends) if ctx.transposed else grouped_outer(rows, gradients, ends)
    to_biases = grouped_sum(gradients, ends) if ctx.needs_input_grad[4] else None
    return to_rows, to_weights, None, None, to_biases


grouped_product.register_autograd(_backward, setup_context=_keep)


@mixed_biases.register_fake
def _(mix: Tensor, biases: Tensor) -> Tensor:
    return mix.new_empty(len(mix), biases.shape[1])


def _backward_of_biases(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
    mix, biases = ctx.saved_tensors
    to_mix = mixed_biases(gradients, biases.t()) if ctx.needs_input_grad[0] else None
    return to_mix, mixed_biases(mix.t(), gradients) if ctx.needs_input_grad[1] else None


mixed_biases.register_autograd(_backward_of_biases, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@register_flop_formula(torch.ops.titanlite.grouped_product)
def _product_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weights[1] * weights[2]  # shapes: each row meets one matrix


@register_flop_formula(torch.ops.titanlite.grouped_outer)
def _outer_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


# ------------------------------------------------------------------------------------------------------------ activations


class Activation(NamedTuple):
    """What an expert makes of its first two matmuls: gate(w1 x) * up(w3 x). The functions compute element by element.

    The gradients of each follow from those of its result and from its argument; the first are overwritten.
    """

    gate: Callable[[Tensor], Tensor]
    up: Callable[[Tensor], Tensor]
    gate_backward: Callable[[Tensor, Tensor], Tensor]
    up_backward: Callable[[Tensor, Tensor], Tensor]

    def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.gate(gate).mul_(self.up(up))

    def backward(
        self, gradients: Tensor, hidden: Tensor, gate: Tensor, up: Tensor, mix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of both matmuls and of mix (n, 1), float32, from those of `hidden` times mix, which are overwritten.

        The third has n values.
        """
        to_mix = (hidden * gradients).sum(dim=-1, dtype=torch.float32)
        gradients.mul_(mix)
        to_up = self.up_backward(self.gate(gate).mul_(gradients), up)
        return self.gate_backward(gradients.mul_(self.up(up)), gate), to_up, to_mix


# gpt-oss (arXiv:2508.10925, section 2.2; the numbers are those of its published code)
_LIMIT, _ALPHA = 7.0, 1.702


def _clamped_gate(x: Tensor) -> Tensor:
    return F.silu(x.clamp(max=_LIMIT) * _ALPHA) / _ALPHA  # x sigmoid(alpha x)


def _clamped_gate_backward(gradients: Tensor, x: Tensor) -> Tensor:
    result = torch.ops.aten.silu_backward(gradients, x.clamp(max=_LIMIT).mul_(_ALPHA))
    return result.masked_fill_(x > _LIMIT, 0)


def _clamped_up(x: Tensor) -> Tensor:
    return x.clamp(-_LIMIT, _LIMIT).add_(1)


def _clamped_up_backward(gradients: Tensor, x: Tensor) -> Tensor:
    return gradients.masked_fill_(x.abs() > _LIMIT, 0)


ActivationName = Literal["swiglu", "clamped_swiglu"]
ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(F.silu, lambda x: x, torch.ops.aten.silu_backward, lambda gradients, x: gradients),
    "clamped_swiglu": Activation(_clamped_gate, _clamped_up, _clamped_gate_backward, _clamped_up_backward),
}


class Activated(torch.autograd.Function):
    """`Activation.hidden` times each row's weight, mix (n, 1) float32, with its own backward pass: experts have the same
    gradients bit for bit, split or not.

    Autograd's are rounded more often: in bfloat16, those of the clamped gate made gradients differ by up to 1.2e-2.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, mix: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(gate, up, mix)
        act = ctx.activation = ACTIVATIONS[name]
        # compiled by PyTorch 2.11, a result that is written in place would have no gradient
        return cast_result(act.gate(gate) * act.up(up) * mix, gate.dtype)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, mix = ctx.saved_tensors
        act = ctx.activation
        to_gate, to_up, to_mix = act.backward(gradients.clone(), act.gate(gate) * act.up(up), gate, up, mix)
        return to_gate, to_up, to_mix[:, None], None
