"""Copies of many tensors in few allocations."""

import torch

from titanlite.checkpoint.pinned import pinned_like


def test_copies_do_not_overlap_and_take_hardly_more_than_their_bytes():
    """The matrices of four blocks with Llama's proportions, moments, a count, and matrices without a row on this rank."""
    shapes = [*[(64, 64), (16, 64), (16, 64), (64, 64), *[(224, 64)] * 3, (64,), (0, 64)] * 4, (2004, 64), (2004, 64)] * 3
    tensors = [torch.full(shape, 1.0) for shape in shapes] + [torch.tensor(7), torch.ones(3, 5, dtype=torch.bfloat16)]
    allocated = []

    def allocate(size: int) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    copies = pinned_like(tensors, allocate)
    for number, copy in enumerate(copies):
        copy.fill_(number % 100)
    assert [(copy.shape, copy.dtype) for copy in copies] == [(tensor.shape, tensor.dtype) for tensor in tensors]
    assert all((copy == number % 100).all() for number, copy in enumerate(copies)), "two of them share memory"
    assert all(size.bit_count() == 1 for size in allocated), "PyTorch would round it up"
    assert sum(allocated) < 1.1 * sum(tensor.nbytes for tensor in tensors)
