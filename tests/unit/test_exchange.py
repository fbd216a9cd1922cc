"""Chunks of an exchange, without ranks: each expert of a token is computed once, no token is sent to a rank twice, and no rank
receives more than fits.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.all_to_all import Chunk, Hop, Layout, Pairs, chunks, pack, unpack

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


def hops_at(rank: int, layout: Layout) -> list[Hop]:
    """The hops of a token that comes through this rank, without groups."""
    within = layout.ranks // layout.nodes
    if layout.nodes == 1:
        return [Hop(None, layout.ranks, 0, layout.experts)]
    of_node = within * layout.experts
    return [Hop(None, layout.nodes, 0, of_node), Hop(None, within, rank // within * of_node, layout.experts)]


def members(rank: int, hop: int, layout: Layout) -> list[int]:
    """The ranks that this one sends to in a hop."""
    within = layout.ranks // layout.nodes
    if layout.nodes == 1:
        return list(range(layout.ranks))
    first = rank // within * within
    return list(range(first, first + within)) if hop else list(range(rank % within, layout.ranks, within))


def counts_of(chosen: Tensor, layout: Layout) -> list[Tensor]:
    """What `exchange_counts` returns on each rank."""
    ranks, hops, shape = range(layout.ranks), len(hops_at(0, layout)), (layout.nodes, layout.ranks // layout.nodes)

    def per_part(numbers: Tensor) -> Tensor:  # (ranks, tokens, n) -> (ranks, n, parts)
        missing = layout.parts * layout.part - layout.tokens
        return F.pad(numbers, (0, 0, 0, missing)).unflatten(1, (layout.parts, -1)).sum(2).mT

    rows = F.one_hot(chosen // layout.experts, layout.ranks).sum(2)  # (ranks, tokens, ranks)
    goes = rows.clamp(max=1)
    sent, load = [per_part(goes)], [per_part(rows).sum(0)]
    if hops > 1:
        of_relays = per_part(goes).unflatten(0, shape).sum(0)  # from all senders with a number, (numbers, ranks, parts)
        to_nodes = per_part(goes.unflatten(2, shape).amax(3))  # (ranks, nodes, parts)
        sent = [torch.zeros_like(sent[0]), torch.zeros_like(sent[0])]
        for rank in ranks:
            sent[0][rank, members(rank, 0, layout)] = to_nodes[rank]
            sent[1][rank, members(rank, 1, layout)] = of_relays[rank % shape[1], members(rank, 1, layout)]
        load.insert(0, sent[1].sum(1))

    def table(rank: int) -> Iterator[Tensor]:
        for hop in range(hops):
            others = members(rank, hop, layout)
            for each in (sent[hop][rank, others], sent[hop][others, rank]):
                yield F.pad(each, (0, 0, 0, layout.ranks - len(others)))
            yield load[hop]

    return [torch.stack([*table(rank)]) for rank in ranks]


def layouts() -> list[Layout]:
    meshes = [(1, 1), (2, 1), (5, 1), (4, 2), (6, 2), (6, 3)]
    sizes = itertools.product(meshes, (1, 4), (1, 30), (1, 3), (0.01, 0.5, 1.5, 9.0))
    return [
        Layout(ranks, experts, tokens, copies, max(1, int(factor * tokens * copies)), nodes)
        for (ranks, nodes), experts, tokens, copies, factor in sizes
        if copies <= ranks * experts
    ]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_expert_of_a_token_is_computed_once_and_no_rank_receives_more_than_fits(routing):
    every = list(enumerate(layouts()))
    for seed, layout in every[ROUTINGS.index(routing) % 3 :: 3]:  # each of them with two routings
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
            assert sum(each.received for each in own[: layout.kept_chunks]) <= layout.kept_tokens
            assert sum(each.relayed for each in own[: layout.kept_chunks]) <= layout.kept_relayed


def check_chunk(layout: Layout, chosen: Tensor, of_ranks: tuple[Chunk, ...]) -> list[tuple[int, int, int]]:
    """Follows one chunk -> (sender, token, expert) of all rows that are computed in it."""
    held = [[(sender, token) for token in range(this.first, this.last)] for sender, this in enumerate(of_ranks)]
    for number in range(len(of_ranks[0].hops)):
        arrived: list[list[tuple[int, int]]] = [[] for _ in of_ranks]
        for rank, (this, here) in enumerate(zip(of_ranks, held, strict=True)):
            hop, sends = hops_at(rank, layout)[number], this.hops[number].sends
            numbers = torch.stack([chosen[pair] for pair in here]) if here else chosen[0, :0]
            assert number == 0 or sum(sends) <= layout.room, "a relay forwards no more than fits"
            tokens = [here[each] for each in Pairs.of(hop.of(numbers), hop.receivers, sum(sends)).tokens]
            for receiver, size in zip(members(rank, number, layout), sends, strict=True):
                part, tokens = tokens[:size], tokens[size:]
                assert len(set(part)) == size, "no token goes to a rank twice"
                place = members(receiver, number, layout).index(rank)
                assert size == of_ranks[receiver].hops[number].receives[place]
                arrived[receiver] += part
            assert not tokens
        held = arrived
    computed = []
    for rank, (this, pairs) in enumerate(zip(of_ranks, held, strict=True)):
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
