"""Pinned memory for many tensors, in few allocations: PyTorch rounds each of them up to a power of two."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_CHUNK = 2**28  # bytes
_ALIGNMENT = 64


def pinned_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_like(tensors: Sequence[Tensor], allocate: Callable[[int], Tensor] = pinned_bytes) -> list[Tensor]:
    """Empty tensors of the same shapes and precisions, each in the first chunk with room; chunks are powers of two.

    With an allocation for each tensor, the host had 10% more than the tensors of Llama 3 8B on 8 ranks need, and 33% more than
    those of Qwen 3 8B; with one allocation for all, 43% and 40%. With these chunks, 0.3% and 7% (benchmarks/NOTES.md).
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    left, chunks = sum(sizes), list[tuple[Tensor, int]]()  # a chunk, and its bytes that are taken
    found = []
    for tensor, size in zip(tensors, sizes, strict=True):
        index = next((i for i, (chunk, taken) in enumerate(chunks) if len(chunk) - taken >= size), len(chunks))
        if index == len(chunks):
            below = 1 << (max(left, 1).bit_length() - 1)  # the last chunks are smaller
            needed = 1 << (max(size, 1) - 1).bit_length()
            chunks.append((allocate(max(needed, min(_CHUNK, below))), 0))
        chunk, first = chunks[index]
        chunks[index] = chunk, first + size
        left -= size
        found.append(chunk[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return found
