"""Chunks of an exchange, without ranks: each expert of a token is computed once, no token is sent to a rank twice, and no rank
receives more than fits.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from models.all_to_all import Chunk, Layout, Pairs, _per_part, chunks, pack, receivers_of, unpack

ROUTINGS = ("random", "one expert", "one rank of many", "last experts", "one token differs", "by halves")


def chosen_of(routing: str, layout: Layout, generator: torch.Generator) -> Tensor:
    """The experts of every rank's tokens, (ranks, tokens, copies)."""
    experts, shape = layout.ranks * layout.experts, (layout.ranks, layout.tokens)
    scores = torch.rand(*shape, experts, generator=generator)
    match routing:
        case "one expert":
            scores[..., 0] += 1
        case "one rank of many":
            scores[0, ..., : layout.experts] += 1
        case "last experts":
            scores += torch.arange(experts)
        case "one token differs":
            scores += torch.arange(experts)
            scores[-1, -1] = torch.rand(experts, generator=generator)
        case "by halves":  # the first tokens of all ranks use other experts than the last ones
            scores[:, : layout.tokens // 2] += torch.arange(experts)
            scores[:, layout.tokens // 2 :] -= torch.arange(experts)
    return scores.topk(layout.copies).indices


def counts_of(chosen: Tensor, layout: Layout) -> list[Tensor]:
    """What `exchange_counts` returns on each rank."""
    sent = torch.stack([_per_part(receivers_of(of_rank, layout), layout) for of_rank in chosen])  # (senders, receivers, parts)
    rows = torch.stack([_per_part(of_rank // layout.experts, layout) for of_rank in chosen]).sum(0)
    return [torch.stack((sent[rank], sent[:, rank], rows)) for rank in range(layout.ranks)]


def layouts() -> list[Layout]:
    sizes = itertools.product((1, 2, 5), (1, 4), (1, 30), (1, 3), (0.01, 0.5, 1.5, 9.0))
    return [
        Layout(ranks, experts, tokens, copies, max(1, int(factor * tokens * copies)))
        for ranks, experts, tokens, copies, factor in sizes
        if copies <= ranks * experts
    ]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_expert_of_a_token_is_computed_once_and_no_rank_receives_more_than_fits(routing):
    for seed, layout in enumerate(layouts()):
        chosen = chosen_of(routing, layout, torch.Generator().manual_seed(seed))
        counts = counts_of(chosen, layout)
        of_ranks = [chunks(each, layout, rank) for rank, each in enumerate(counts)]
        assert len({len(each) for each in of_ranks}) == 1, "as many chunks on every rank, since they take part in each other's"
        computed = Counter(pair for chunk in zip(*of_ranks, strict=True) for pair in check_chunk(layout, chosen, chunk))
        expected = Counter(
            (rank, token, expert)
            for rank, of_rank in enumerate(chosen.tolist())
            for token, row in enumerate(of_rank)
            for expert in row
        )
        assert computed == expected, (routing, layout)
        for own in of_ranks:
            assert sum(sum(each.receives) for each in own[: layout.kept_chunks]) <= layout.kept_tokens


def check_chunk(layout: Layout, chosen: Tensor, of_ranks: tuple[Chunk, ...]) -> list[tuple[int, int, int]]:
    """Follows one chunk -> (sender, token, expert) of all rows that are computed in it."""
    arrived: list[list[tuple[int, int]]] = [[] for _ in of_ranks]  # (sender, token)
    for sender, this in enumerate(of_ranks):
        receivers = receivers_of(chosen[sender, this.first : this.last], layout)
        tokens = (Pairs.of(receivers, layout.ranks, sum(this.sends)).tokens + this.first).tolist()
        for receiver, sends in enumerate(this.sends):
            part, tokens = tokens[:sends], tokens[sends:]
            assert part == sorted(set(part)), "no token goes to a rank twice"
            assert sends == of_ranks[receiver].receives[sender]
            arrived[receiver] += [(sender, token) for token in part]
        assert not tokens
    computed = []
    for rank, (this, pairs) in enumerate(zip(of_ranks, arrived, strict=True)):
        assert this.rows <= layout.room
        numbers = torch.stack([chosen[pair] for pair in pairs]) if pairs else chosen[0, :0]
        own = numbers - rank * layout.experts
        elsewhere = (own < 0) | (own >= layout.experts)
        assert not elsewhere.all(-1).any(), "no token goes to a rank that has no expert for it"
        rows = Pairs.of(own.masked_fill(elsewhere, layout.experts), layout.experts, this.rows)
        experts = own.flatten()[rows.chosen].tolist()
        assert len(experts) == this.rows and experts == sorted(experts)
        assert rows.ends.tolist() == [sum(each <= expert for each in experts) for expert in range(layout.experts)]
        computed += [
            (*pairs[token], expert + rank * layout.experts) for token, expert in zip(rows.tokens, experts, strict=True)
        ]
    return computed


def test_balanced_tokens_are_divided_into_two_chunks_of_equal_work():
    layout = Layout(ranks=8, experts=16, tokens=512, copies=8, capacity=6144)
    chosen = chosen_of("random", layout, torch.Generator().manual_seed(0))
    for rank, counts in enumerate(counts_of(chosen, layout)):
        first, second = chunks(counts, layout, rank)
        assert abs(first.rows - second.rows) < 0.3 * first.rows


def test_what_is_packed_is_unpacked_bit_for_bit():
    for dtype, dim in ((torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 5)):
        x, numbers, mix = torch.randn(3, dim).to(dtype), torch.randint(0, 9, (3, 2), dtype=torch.int32), torch.randn(3, 2)
        found = unpack(pack(x, numbers, mix), dim, dtype, torch.int32, torch.float32)
        assert all(map(torch.equal, found, (x, numbers, mix)))
