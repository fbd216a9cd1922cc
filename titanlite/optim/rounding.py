"""Rounding float32 results to bfloat16 without losing small updates: stochastic rounding, and kept remainders.

bfloat16 has 8 bits of mantissa. Rounded to nearest, a weight does not move by steps smaller than 1/512 of it, and most steps
of training are smaller. Two remedies:

- stochastic rounding (Gupta et al., "Deep learning with limited numerical precision", arXiv:1502.02551): up or down at random,
  so that the mean is right. The random bits are a hash of (name, step, position in the whole parameter): every mesh rounds
  alike.
- a remainder: the 16 bits of a float32 that bfloat16 lacks, kept beside it. Both together are exactly the float32.

Tensors here are local and two-dimensional. Every operation is a single IEEE or integer operation, so that a value does not
depend on its shard. Compiled functions take changing numbers as tensors.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.ground import torch_private
from titanlite.ground.torch_private import shapes_config
from titanlite.transforms.shards import box_index, global_offset, local_part, splitmix64

Compiler = Callable[[Callable[..., None]], Callable[..., None]]
_LOW = 0xFFFF
# Values in a row of `Positions`: the largest power of two up to _ROW that divides the parameter's last dimension; where that is
# below _FEW, the parameter's own rows.
_ROW, _FEW = 1024, 16
_TILE = 2**20  # values processed at a time where nothing is compiled, to bound the temporaries


class Positions(NamedTuple):
    """Positions of a shard's values in the whole parameter, modulo 2**32: the sum of the row's and the column's number.

    The rows are parts of the parameter's, of one length for all parameters where that is possible: a kernel that knows the
    length reads 16 bytes at a time and divides by a constant.
    """

    rows: Tensor  # (rows, 1) int32
    columns: Tensor  # (columns,) int32


def flat(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor as a matrix that shares its memory, (rows, columns); of a vector (1, columns)."""
    local = local_part(tensor)
    return local[None] if local.ndim == 1 else local.flatten(1)


def positions(tensor: Tensor) -> Positions:
    """The positions of this rank's values, in the order of `flat(tensor)`."""
    local = local_part(tensor)
    first, inner = box_index(tuple(tensor.shape), global_offset(tensor), tuple(local.shape), local.device)
    if local.ndim == 1:
        first, inner = inner, first
    width = math.gcd(local.shape[-1], _ROW)
    if width < _FEW:
        return Positions(_wrapped(first)[:, None], _wrapped(inner))
    rows = (first[:, None] + inner[::width]).flatten()
    return Positions(_wrapped(rows)[:, None], _wrapped(inner[:width] - inner[:1]))


def _wrapped(index: Tensor) -> Tensor:
    """int64 -> int32, modulo 2**32."""
    return ((index + 2**31) % 2**32 - 2**31).int()


def each_row(table: Tensor) -> list[Tensor]:
    """The rows of a table, for a compiled function. The compiler specializes on a tensor with storage offset 0; none of these
    has it."""
    return list(torch.cat([table[:1], table]).unbind()[1:])


def keys_of(names: Tensor, counts: Tensor) -> Tensor:
    """Keys of a step's random bits, (n, 4) int32, for n parameters.

    names: (n,) int64, a hash of each name. counts: (n,) how many steps each has taken.
    """
    first = splitmix64(counts.long(), names)
    return torch.stack([first, splitmix64(first, names)], dim=1).view(torch.int32)


def random_bits(position: Positions, key: Tensor, word: int) -> Tensor:
    """32 random bits for each value, (rows, columns) int32; key: (4,) of `keys_of`; word: 0 or 1, for two independent ones.

    The mixing function is "lowbias32" (C. Wellons, "Prospecting for hash functions", 2018), with a second key in between.
    """
    x = (position.rows + position.columns) ^ key[2 * word]
    x = (x ^ ((x >> 16) & _LOW)) * 0x7FEB352D + key[2 * word + 1]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & _LOW)


def stochastic(value: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16, up with the probability that makes the mean right; of `bits`, int32, the lower 16 decide."""
    return ((value.view(torch.int32) + (bits & _LOW)) & ~_LOW).view(torch.float32).bfloat16()


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> the nearest bfloat16 (halves away from zero) and the remainder, int16, that `joined` takes."""
    whole = value.view(torch.int32)
    high = (whole + 0x8000) & ~_LOW
    return high.view(torch.float32).bfloat16(), (whole - high).short()


def joined(value: Tensor, remainder: Tensor | None) -> Tensor:
    """The float32 that `split` was given; without a remainder the value itself, as float32."""
    if remainder is None:
        return value.float()
    return (value.float().view(torch.int32) + remainder.int()).view(torch.float32)


def store(
    target: Tensor, remainder: Tensor | None, value: Tensor, position: Positions, key: Tensor, word: int, skip: Tensor
) -> None:
    """Writes float32 values to `target` unless `skip`, () bool: unchanged to float32; to bfloat16 with their remainder where
    there is one, else rounded stochastically. position, key, word: as of `random_bits`."""
    if target.dtype == torch.float32:
        target.copy_(torch.where(skip, target, value))
    elif remainder is not None:
        high, low = split(value)
        target.copy_(torch.where(skip, target, high))
        remainder.copy_(torch.where(skip, remainder, low))
    else:
        target.copy_(torch.where(skip, target, stochastic(value, random_bits(position, key, word))))


def root(value: Tensor) -> Tensor:
    """The correctly rounded square root of float32 values, as in compiled kernels. PyTorch's own on a CPU is off by one in the
    last digit of every fifth value."""
    return value.sqrt() if torch.compiler.is_compiling() else value.double().sqrt().float()


def compile_kernel(update: Callable[..., None]) -> Callable[..., None]:
    """A kernel for matrices with any number of rows of one length, and once there is a second length, one for any length."""
    return torch.compile(update, fullgraph=True)


def elementwise(update: Callable[..., None], compiler: Compiler | None) -> Callable[..., None]:
    """update(tensors, position, *rest) as one compiled kernel for a whole matrix, or uncompiled for a few rows at a time.

    tensors: all (rows, columns) of one shape; nothing is done for an empty one, as where there are more ranks than rows.
    compiler: None: uncompiled.
    """
    kernel = compiler(update) if compiler else update

    def apply(tensors: list[Tensor], position: Positions, *rest: Tensor) -> None:
        if not tensors[0].numel():
            return
        count, width = len(position.rows), len(position.columns)
        tensors = [tensor.view(count, width) for tensor in tensors]
        if compiler:
            varying = [(tensor, 0) for tensor in (*tensors, position.rows)]
            if width % _FEW:  # the parameter's own
                varying += [*((tensor, 1) for tensor in tensors), (position.columns, 0)]
            for tensor, dimension in varying:
                torch_private.maybe_mark_dynamic(tensor, dimension)
            kernel(tensors, position, *rest)
            return
        height = max(1, _TILE // width)
        for first in range(0, count, height):
            rows = slice(first, first + height)
            kernel([tensor[rows] for tensor in tensors], Positions(position.rows[rows], position.columns), *rest)

    return apply


def any_shape() -> AbstractContextManager:
    """Compiles for matrices of any shape: a square one must not make the compiler assume that all are square."""
    return shapes_config.patch(use_duck_shape=False)
