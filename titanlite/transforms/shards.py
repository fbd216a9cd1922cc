"""Shards: the positions of a shard's values in the whole parameter, and a hash of such positions.

Random choices about a value (initial value, rounding) are functions of its position in the whole parameter, and so depend
neither on the number of ranks nor on the device: a counter-based generator (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC'11) made of integer operations.
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.ground.torch_private import compute_local_shape_and_global_offset, disable_current_modes


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached: the local shard of a DTensor, or the tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_offset(tensor: Tensor) -> tuple[int, ...]:
    """The position in the whole tensor where this rank's shard, a box, begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    with disable_current_modes():  # PyTorch computes offsets with tensors, which must be real also in FakeTensorMode
        return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def box_index(
    shape: tuple[int, ...], offset: tuple[int, ...], box: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions in the flattened whole parameter: of each row of the box, and of each value within a row, both int64.

    A value's position is the sum of the two. A row spans all dimensions but the first.
    """
    inner = torch.zeros(1, dtype=torch.int64, device=device)
    stride = 1
    for size, first, count in reversed(list(zip(shape[1:], offset[1:], box[1:], strict=True))):
        along = torch.arange(first, first + count, device=device) * stride
        inner = (along[:, None] + inner).flatten()
        stride *= size
    return torch.arange(offset[0], offset[0] + box[0], device=device) * stride, inner


def key_of(text: str) -> int:
    """A signed 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def splitmix64(index: Tensor, key: int | Tensor) -> Tensor:
    """splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), int64 -> int64."""
    z = index * -0x61C8864680B583EB + key
    z = (z ^ _shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; an int64 shift alone extends the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
