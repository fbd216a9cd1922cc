"""The all-to-alls of expert parallelism: how a rank's tokens are divided into chunks, and how a chunk is sent.

A token is sent once to each rank that has experts for it. Where experts are split over nodes, it can be sent once to each node
instead, in two hops: to the rank with the sender's number in that node, which forwards it to the ranks of its node. Such a
relay adds up what they return, so that one sum goes back to the sender (DeepEP has the idea: arXiv:2412.19437, section 3.2.2).

The tokens of a rank are divided into chunks. That bounds what a rank receives or forwards at a time, under any routing, and
overlaps the all-to-all of one chunk with the matmuls of another. All ranks make the same chunks from the same counts. The
host waits for these counts, because the sizes of messages must be numbers.
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.torch_private import resolve_process_group

KEPT = 2  # chunks: one is computed while the other is in flight
_PARTS = 8  # of a rank's tokens, at least; chunks consist of whole parts


class Layout(NamedTuple):
    """Sizes that do not depend on the routing. A row is a token for one of its experts."""

    ranks: int
    experts: int  # of each rank
    tokens: int  # of each rank
    copies: int  # experts of a token
    capacity: int  # rows that a rank receives in two chunks
    nodes: int = 1  # with relays, the nodes to which a token is sent first

    @property
    def rows_of_token(self) -> int:
        """The most rows of one token on one rank."""
        return min(self.copies, self.experts)

    @property
    def room(self) -> int:
        """The most rows that a rank receives in one chunk; a token of each rank always fits."""
        of_token = self.ranks * self.rows_of_token
        return min(max(-(-self.capacity // KEPT), of_token), of_token * -(-self.tokens // KEPT))

    @property
    def part(self) -> int:
        """Tokens of each rank that fit a chunk under any routing; a chunk consists of such parts."""
        return min(self.room // (self.ranks * self.rows_of_token), max(1, self.tokens // _PARTS))

    @property
    def parts(self) -> int:
        return -(-self.tokens // self.part)

    @property
    def kept_chunks(self) -> int:
        return min(KEPT, self.parts)

    @property
    def kept_tokens(self) -> int:
        """The most tokens that are received in the chunks that are kept."""
        return min(self.kept_chunks * self.room, self.ranks * self.tokens)

    @property
    def kept_relayed(self) -> int:
        """The most tokens that a relay forwards in the chunks that are kept."""
        return min(self.kept_chunks * self.room, self.nodes * self.tokens) if self.nodes > 1 else 0


class Hop(NamedTuple):
    """An all-to-all on the way of a token: over all ranks of the experts, or over nodes and then over the ranks of a node."""

    group: Any
    receivers: int  # the ranks of the group; each stands for its node in the hop between nodes
    first: int  # expert of all receivers
    experts: int  # of each receiver

    def of(self, chosen: Tensor) -> Tensor:
        """Where a token goes, (tokens, copies) int, by its experts: `receivers` where an expert is not in the group, or where
        an expert before it is on the same rank, or node.
        """
        receivers = (chosen - self.first).div(self.experts, rounding_mode="floor")
        earlier = (receivers[:, :, None] == receivers[:, None, :]).tril(-1).any(-1)
        return receivers.masked_fill(earlier | (receivers < 0) | (receivers >= self.receivers), self.receivers)


def hops_of(groups: str, experts: int) -> list[Hop]:
    """The hops of a token. experts: of each rank.

    groups: the name of the process group of all ranks; or "between,within", the names of those between nodes and within one.
    """
    first, *others = map(resolve_process_group, groups.split(","))
    if not others:
        return [Hop(first, first.size(), 0, experts)]
    (within,) = others
    of_node = within.size() * experts
    return [Hop(first, first.size(), 0, of_node), Hop(within, within.size(), first.rank() * of_node, experts)]


def rank_of(hops: list[Hop]) -> int:
    """This rank's number among those that the experts are split over."""
    return functools.reduce(lambda number, hop: number * hop.receivers + hop.group.rank(), hops, 0)


class Splits(NamedTuple):
    """Of one hop: the tokens that this rank sends to each of its receivers, and receives from each sender."""

    sends: list[int]
    receives: list[int]


class Chunk(NamedTuple):
    """What this rank sends and receives at a time."""

    first: int  # of this rank's tokens
    last: int
    hops: list[Splits]
    rows: int  # that this rank computes

    @property
    def received(self) -> int:
        """The tokens that arrive at this rank's experts."""
        return sum(self.hops[-1].receives)

    @property
    def relayed(self) -> int:
        """The tokens that this rank receives to forward them."""
        return sum(sum(hop.receives) for hop in self.hops[:-1])


def chunks(counts: Tensor, layout: Layout, rank: int) -> list[Chunk]:
    """The chunks of this rank; all ranks have the same number of them. counts: of `exchange_counts`."""
    of_hops = counts.unflatten(0, (-1, 3))  # (hops, 3, ranks, parts)
    loads = of_hops[:, 2]
    sizes = [layout.ranks] if len(of_hops) == 1 else [layout.nodes, layout.ranks // layout.nodes]
    cuts = cuts_of(F.pad(loads.flatten(0, 1).cumsum(1), (1, 0)), layout)
    return [
        Chunk(
            first * layout.part,
            min(last * layout.part, layout.tokens),
            [Splits(*hop[:2, :size, first:last].sum(2).tolist()) for hop, size in zip(of_hops, sizes, strict=True)],
            int(loads[-1, rank, first:last].sum()),
        )
        for first, last in pairwise(cuts)
    ]


def cuts_of(ends: Tensor, layout: Layout) -> list[int]:
    """The parts at which chunks begin and end: as few chunks as fit, with equal work for the rank that receives most.

    ends: (ranks, parts + 1), how many rows a rank has received before each part. With relays, (2 x ranks, parts + 1): before
    them, how many tokens each rank has forwarded.
    """
    busiest = ends[ends[:, -1].argmax()]
    total = int(busiest[-1])
    for number in range(max(layout.kept_chunks, -(-total // layout.room)), layout.parts):
        targets = torch.arange(1, number) * total // number
        nearest = torch.searchsorted(busiest[1:] + busiest[:-1], 2 * targets)
        cuts = sorted({0, *nearest.tolist(), layout.parts})
        if int(ends[:, cuts].diff(dim=1).max()) <= layout.room:
            return cuts
    return list(range(layout.parts + 1))


class Pairs(NamedTuple):
    """The pairs of a token and one of its numbers (ranks, or experts), sorted by number and then by token."""

    tokens: Tensor  # (n,) int64
    chosen: Tensor  # (n,) int64: the position of each pair in the flattened numbers
    positions: Tensor  # (tokens, copies) int64: where each pair is in this order; n if it is left out
    ends: Tensor  # (numbers,) int32: where each number's pairs end

    @classmethod
    def of(cls, numbers: Tensor, end: int, n: int) -> "Pairs":
        """numbers: (tokens, copies) int; pairs with `end` are left out. n: how many are less than `end`."""
        values, order = numbers.flatten().sort(stable=True)
        positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).clamp_(max=n)
        ends = torch.searchsorted(values, torch.arange(end, device=values.device, dtype=values.dtype), right=True).int()
        return cls(order[:n] // numbers.shape[1], order[:n], positions.view_as(numbers), ends)

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of each token's rows, in float32: (n + 1, a) -> (tokens, a). The last row is not read."""
        return F.embedding_bag(self.positions, rows, mode="sum", padding_idx=len(self.tokens))


class Arriving(NamedTuple):
    """An all-to-all in flight, and the rows that arrive here."""

    rows: Tensor
    work: Any
    sent: Tensor  # must live as long

    def wait(self) -> Tensor:
        self.work.wait()
        return self.rows


def begin(rows: Tensor, sends: list[int], receives: list[int], group: Any, into: Tensor | None = None) -> Arriving:
    """Begins an all-to-all of rows. into: gets the rows that arrive; None: a new tensor, with one row more."""
    whole = rows.new_empty(sum(receives) + 1, *rows.shape[1:]) if into is None else into
    work = dist.all_to_all_single(whole[: sum(receives)], rows, receives, sends, group=group, async_op=True)
    return Arriving(whole, work, rows)


class Returning(NamedTuple):
    """Sums of a chunk on their way back to the ranks of its tokens."""

    this: Chunk
    hop: int
    arriving: Arriving


class Route(NamedTuple):
    """The way of a rank's tokens to the ranks of their experts, and back."""

    chosen: Tensor  # (tokens, copies) int64
    hops: list[Hop]
    sorted: dict[tuple[int, int], Pairs]  # by hop and a chunk's first token: the tokens that are sent, by their receivers

    @classmethod
    def of(cls, chosen: Tensor, groups: str, experts: int) -> "Route":
        return cls(chosen, hops_of(groups, experts), {})

    def relay(self, this: Chunk, numbers: Tensor) -> None:
        """Sorts the tokens that this rank forwards. numbers: of their experts, (tokens, copies) int32."""
        self.sorted[1, this.first] = Pairs.of(self.hops[1].of(numbers), self.hops[1].receivers, sum(this.hops[1].sends))

    def sent(self, this: Chunk, hop: int = 0) -> Pairs:
        """The tokens of a chunk that this rank sends in a hop, sorted by their receivers."""
        if hop == 0 and (0, this.first) not in self.sorted:
            receivers = self.hops[0].of(self.chosen[this.first : this.last])
            self.sorted[0, this.first] = Pairs.of(receivers, self.hops[0].receivers, sum(this.hops[0].sends))
        return self.sorted[hop, this.first]

    def _begin(self, x: Tensor, this: Chunk, hop: int, into: Tensor | None) -> Arriving:
        return begin(x.index_select(0, self.sent(this, hop).tokens), *this.hops[hop], self.hops[hop].group, into)

    def dispatch(
        self,
        these: list[Chunk],
        x: Callable[[Chunk], Tensor],
        into: list[Tensor] | None = None,
        relay: Callable[[Chunk, Tensor], None] = lambda *_: None,
    ) -> list[Arriving]:
        """Sends x of the tokens of chunks, (tokens, ...), once to each rank that has experts for them.

        into: a buffer for each chunk. relay: is called with what this rank forwards.
        """
        relays, ends = len(self.hops) > 1, [*into] if into else [None] * len(these)
        arriving = [self._begin(x(this), this, 0, None if relays else end) for this, end in zip(these, ends, strict=True)]
        for number, (this, end) in enumerate(zip(these, ends, strict=True)) if relays else ():
            passing = arriving[number].wait()[:-1]
            relay(this, passing)
            arriving[number] = self._begin(passing, this, 1, end)
        return arriving

    def back(self, x: Tensor, this: Chunk, hop: int = -1) -> Returning:
        """Returns one row for each token that a hop has brought."""
        sends, receives = this.hops[hop]
        return Returning(this, hop % len(self.hops), begin(x, receives, sends, self.hops[hop].group))

    def passed_on(self, each: Returning, sums: Callable[[Pairs, Tensor], Tensor]) -> Returning:
        """Adds up what returns to this rank as a relay, and passes it on to the ranks of the tokens."""
        if each.hop == 0:
            return each
        return self.back(sums(self.sent(each.this, each.hop), each.arriving.wait()), each.this, each.hop - 1)


def pack(x: Tensor, *beside: Tensor) -> Tensor:
    """x (n, dim) and other tensors of n rows, with values of 4 bytes -> one tensor (n, width) int32."""
    odd = x.shape[1] * x.element_size() % 4 != 0
    return torch.cat([each.view(torch.int32) for each in (*beside, F.pad(x, (0, 1)) if odd else x.contiguous())], dim=1)


def unpack(packed: Tensor, dim: int, dtype: torch.dtype, *beside: torch.dtype) -> list[Tensor]:
    """The arguments of `pack` as views: x, and the others, which have equal numbers of columns."""
    width = -(-dim * dtype.itemsize // 4)
    *parts, x = packed.split([(packed.shape[1] - width) // len(beside)] * len(beside) + [width], dim=1)
    return [x.view(dtype)[:, :dim], *(part.view(kind) for part, kind in zip(parts, beside, strict=True))]


# ------------------------------------------------------------------------------------------------------------------ counts


@torch.library.custom_op("titanlite::exchange_counts", mutates_args=())
def exchange_counts(chosen: Tensor, ranks: int, experts: int, capacity: int, groups: str) -> Tensor:
    """How many tokens ranks send to each other. The host waits for the device here, and nowhere else.

    chosen: (tokens, copies) int64, the experts of this rank's tokens. experts: of each rank. groups: of `hops_of`.

    -> (3 x hops, ranks, parts) int64 on the host, for each hop and each part of the tokens: those that this rank sends to each
    receiver and receives from each sender, filled up with zeros, and the load of every rank: in the last hop the rows that it
    computes, in the one before it the tokens that it forwards.
    """
    hops, layout = hops_of(groups, experts), Layout(ranks, experts, chosen.shape[0], chosen.shape[1], capacity)
    tokens = _per_part(Hop(None, ranks, 0, experts).of(chosen), ranks, layout)
    ahead = torch.stack((tokens, _per_part(chosen // experts, ranks, layout)), dim=1)  # (ranks, 2, parts): tokens and rows
    splits, loads = list[Tensor](), list[Tensor]()
    for hop in hops:
        last, message = hop is hops[-1], ahead.view(hop.receivers, -1, layout.parts)
        if not last:  # a token goes once to a node, to several ranks of which it may go on
            message = torch.cat((_per_part(hop.of(chosen), hop.receivers, layout)[:, None], message), dim=1)
        arrived = _all_to_all(message, hop)
        splits += [F.pad(each[:, 0], (0, 0, 0, ranks - hop.receivers)) for each in (message, arrived)]
        ahead = arrived[:, 0 if last else 1 :].sum(0).view(-1, 2, layout.parts)
        loads.append(ahead[:, 1 if last else 0].sum(0))
    every = torch.stack(loads)  # of this rank, (hops, parts)
    for hop in reversed(hops):  # an all-gather, whose function 2.13 renames, with a warning for the old name
        every = _all_to_all(every.expand(hop.receivers, *every.shape), hop)
    of_hops = every.view(ranks, len(hops), -1).unbind(1)
    return _on_host(torch.stack([each for number, load in enumerate(of_hops) for each in (*splits[2 * number :][:2], load)]))


def _all_to_all(message: Tensor, hop: Hop) -> Tensor:
    arrived = torch.empty_like(message, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, message.contiguous(), group=hop.group)
    return arrived


def _per_part(numbers: Tensor, end: int, layout: Layout) -> Tensor:
    """How often each number below `end` occurs in each part of the tokens: (tokens, copies) -> (end, parts) int64."""
    missing = layout.parts * layout.part - layout.tokens
    of_parts = F.pad(numbers, (0, 0, 0, missing), value=end).view(layout.parts, -1, 1)
    return (of_parts == torch.arange(end, device=numbers.device)).sum(1).t()


@exchange_counts.register_fake
def _(chosen: Tensor, ranks: int, experts: int, capacity: int, groups: str) -> Tensor:
    layout = Layout(ranks, experts, chosen.shape[0], chosen.shape[1], capacity)
    return chosen.new_empty(3 * len(groups.split(",")), ranks, layout.parts, device="cpu")


exchange_counts.register_autograd(lambda ctx, _: (None,) * 5)


def _on_host(counts: Tensor) -> Tensor:
    """The copy for which the host waits."""
    return counts.to("cpu", copy=True)
