"""A sequence split over ranks: the part of each rank, and that its attention equals that of the whole sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import attention
from models.attention import AttentionCore, SeqInfo, block_mask, dense_mask, with_mask
from models.split import Split, attend_by_parts, split_sequence
from titanlite.parallel.context import unsplittable

CPU = torch.device("cpu")
LENGTH = 48


def splits(ranks: int, method: Any, length: int = LENGTH) -> list[Split]:
    meshes: list[Any] = [SimpleNamespace(size=lambda: ranks, get_local_rank=lambda rank=rank: rank) for rank in range(ranks)]
    return [split_sequence(mesh, method, length, CPU) for mesh in meshes]


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 6])
def test_each_token_is_on_one_rank(ranks, method):
    parts = splits(ranks, method)
    assert torch.cat([part.positions for part in parts]).sort().values.tolist() == [*range(LENGTH)]
    assert all(len(part.positions) == LENGTH // ranks and part.length == LENGTH for part in parts)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_with_gathered_keys_all_ranks_attend_to_equally_many(ranks):
    assert len({(part.positions + 1).sum().item() for part in splits(ranks, "gather")}) == 1


def test_with_heads_exchanged_the_ranks_have_the_sequence_in_order():
    assert torch.cat([part.positions for part in splits(4, "ulysses")]).tolist() == [*range(LENGTH)]


@pytest.mark.parametrize(("ranks", "dtype"), [(4, torch.float64), (2, torch.bfloat16)], ids=str)
def test_attention_without_a_mask_and_its_gradients_equal_the_full_sequence(ranks, dtype):
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, LENGTH, 16, dtype=dtype, requires_grad=True) for heads in (6, 2, 2)]
    gradient = torch.randn(2, 6, LENGTH, 16, dtype=dtype)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad(expected, whole, gradient)
    found = [torch.zeros_like(each) for each in gradients]
    for split in splits(ranks, "gather"):
        out = attend_by_parts(whole[0][:, :, split.positions], *whole[1:], split, 0.3)
        near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(out, expected[:, :, split.positions], **near)
        for total, part in zip(found, torch.autograd.grad(out, whole, gradient[:, :, split.positions]), strict=True):
            total += part
    for total, gradient in zip(found, gradients, strict=True):
        assert (total - gradient).double().norm() < (1e-12 if dtype == torch.float64 else 0.02) * gradient.double().norm()


@pytest.mark.parametrize("window", [None, 7])
def test_a_mask_has_the_rows_of_this_ranks_queries(window):
    lengths = torch.tensor([[10, 20, 18], [1, 46, 1]])
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), row) for row in lengths]).int()
    whole = dense_mask(documents, window)
    for split in splits(2, "gather"):
        seq = SeqInfo(split.positions.expand(2, -1), documents, split=split)
        assert torch.equal(with_mask(seq, window).mask, whole[:, :, split.positions])
        assert torch.equal(attention._dense(block_mask(documents, window, split.positions)), whole[:, :, split.positions])


def test_a_window_as_long_as_the_whole_sequence_needs_no_mask_and_a_shorter_one_does():
    (split, _) = splits(2, "gather")
    seq = SeqInfo(split.positions[None], split=split)
    assert with_mask(seq, LENGTH).mask is None
    assert with_mask(seq, LENGTH - 1).mask.shape == (1, 1, LENGTH // 2, LENGTH)  # longer than this rank's part


class Own(AttentionCore):
    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq: SeqInfo) -> torch.Tensor:
        return v


@pytest.mark.parametrize(("kinds", "splits_it"), [([AttentionCore] * 2, True), ([AttentionCore, Own], False), ([], False)])
def test_a_block_must_use_the_attention_that_communicates(kinds, splits_it):
    block = nn.ModuleList(kind(2, 2, 4) for kind in kinds)
    model: Any = SimpleNamespace(layers=nn.ModuleDict({"0": block}))
    assert ("layers.0 does not use AttentionCore.core" not in unsplittable(model)) == splits_it
