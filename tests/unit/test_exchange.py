"""Rounds of an exchange, without ranks: every row arrives once, where its expert is, and no rank receives more than it has room
for."""

import itertools

import pytest
import torch
from torch import Tensor

from models.exchange import Chunk, Counts, chunks

# How many rows go from each rank to each expert: (senders, receivers, experts of a receiver).
KINDS = ("random", "few", "nothing", "one expert", "one sender", "one row", "very uneven", "last expert")


def counts_of(kind: str, ranks: int, experts: int, generator: torch.Generator) -> Tensor:
    shape = ranks, ranks, experts
    counts = torch.zeros(shape, dtype=torch.int64)
    match kind:
        case "random":
            return torch.randint(0, 9, shape, generator=generator)
        case "few":
            return torch.randint(0, 9, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
        case "one expert":
            counts[:, 0, 0] = torch.randint(0, 30, (ranks,), generator=generator)
        case "one sender":
            counts[-1] = torch.randint(0, 30, (ranks, experts), generator=generator)
        case "one row":
            counts[-1, 0, -1] = 1
        case "very uneven":
            return (torch.rand(shape, generator=generator) ** 12 * 200).long()
        case "last expert":
            counts[:, -1, -1] = 17
    return counts


def cases() -> list[tuple[str, int, int, int, int]]:
    """(kind, ranks, experts of each, capacity, seed)"""
    sizes = itertools.product(KINDS, (1, 2, 3, 5), (1, 2, 4), (1, 3, 8, 1000))
    return [(*size, seed) for seed, size in enumerate(sizes)]


def rows_of(counts: Tensor, rank: int) -> list[tuple[int, int, int]]:
    """The rows of a rank, sorted by expert: (sender, number of the expert, which of these)."""
    numbers = enumerate(counts[rank].flatten().tolist())
    return [(rank, expert, number) for expert, count in numbers for number in range(count)]


def exchange(rows: list[list], by_rank: list[Chunk]) -> list[list]:
    """What each rank receives in a round, in the order in which it arrives: by sender."""
    arrived: list[list] = [[] for _ in by_rank]
    for own, this in zip(rows, by_rank, strict=True):
        for receiver, (first, last) in enumerate(this.segments):
            assert last - first == this.gives[receiver]
            arrived[receiver] += own[first:last]
    return arrived


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_received_once_by_the_rank_of_its_expert_and_never_more_than_capacity(kind):
    for case in cases():
        if case[0] == kind:
            check_chunks(*case)


def check_chunks(kind: str, ranks: int, experts: int, capacity: int, seed: int) -> None:
    counts = counts_of(kind, ranks, experts, torch.Generator().manual_seed(seed))
    sent = [list(chunks(Counts(counts, counts.clone()), rank, capacity)) for rank in range(ranks)]
    numbers = {len(each) for each in sent}
    most = int(counts.sum((0, 2)).max())
    assert numbers == {max(1, -(-most // capacity))}, "as many chunks on every rank, and no more than are needed"
    rows = [rows_of(counts, rank) for rank in range(ranks)]
    received: list[list] = [[] for _ in range(ranks)]
    for by_rank in zip(*sent, strict=True):
        for rank, (this, arrived) in enumerate(zip(by_rank, exchange(rows, list(by_rank)), strict=True)):
            assert this.takes == [sum(row[0] == sender for row in arrived) for sender in range(ranks)]
            assert len(arrived) <= capacity
            by_expert = [arrived[place] for place in this.by_expert.tolist()]
            owned = [expert - rank * experts for _, expert, _ in by_expert]
            assert owned == sorted(owned) and all(0 <= expert < experts for expert in owned)
            assert this.ends.tolist() == [sum(each <= expert for each in owned) for expert in range(experts)]
            received[rank] += by_expert
    expected = [sorted(row for row in itertools.chain(*rows) if row[1] // experts == rank) for rank in range(ranks)]
    assert [sorted(each) for each in received] == expected
