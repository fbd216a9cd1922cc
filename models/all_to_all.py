"""The all-to-alls of expert parallelism: how a rank's tokens are divided into chunks, and how a chunk is sent.

A token is sent once to each rank that has experts for it. The tokens of a rank are divided into chunks. That bounds what a rank
receives at a time, under any routing, and overlaps the all-to-all of one chunk with the matmuls of another. All ranks make
the same chunks from the same counts. The host waits for these counts, because the sizes of messages must be numbers.
"""

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


class Chunk(NamedTuple):
    """What this rank sends and receives at a time."""

    first: int  # of this rank's tokens
    last: int
    sends: list[int]  # tokens to each rank
    receives: list[int]  # tokens from each rank
    rows: int  # that this rank computes


def chunks(counts: Tensor, layout: Layout, rank: int) -> list[Chunk]:
    """The chunks of this rank; all ranks have the same number of them. counts: of `exchange_counts`."""
    sent, received, rows = counts
    cuts = cuts_of(F.pad(rows.cumsum(1), (1, 0)), layout)
    return [
        Chunk(
            first * layout.part,
            min(last * layout.part, layout.tokens),
            sent[:, first:last].sum(1).tolist(),
            received[:, first:last].sum(1).tolist(),
            int(rows[rank, first:last].sum()),
        )
        for first, last in pairwise(cuts)
    ]


def cuts_of(ends: Tensor, layout: Layout) -> list[int]:
    """The parts at which chunks begin and end: as few chunks as fit, with equal work for the rank that receives most.

    ends: (ranks, parts + 1), how many rows a rank has received before each part.
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


def receivers_of(chosen: Tensor, layout: Layout) -> Tensor:
    """The rank of each expert of a token; `ranks` where an expert before it is on the same rank."""
    receivers = chosen // layout.experts
    earlier = (receivers[:, :, None] == receivers[:, None, :]).tril(-1).any(-1)
    return receivers.masked_fill(earlier, layout.ranks)


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
def exchange_counts(chosen: Tensor, ranks: int, experts: int, capacity: int, group_name: str) -> Tensor:
    """How many tokens ranks send to each other. The host waits for the device here, and nowhere else.

    chosen: (tokens, copies) int64, the experts of this rank's tokens. experts: of each rank.

    -> (3, ranks, parts) int64 on the host, for each part of the tokens: those that this rank sends to each rank and receives
    from each rank, and the rows that each rank receives from all.
    """
    group, layout = resolve_process_group(group_name), Layout(ranks, experts, chosen.shape[0], chosen.shape[1], capacity)
    sent = torch.stack([_per_part(numbers, layout) for numbers in (receivers_of(chosen, layout), chosen // experts)], dim=1)
    received = torch.empty_like(sent)  # (ranks, 2, parts)
    dist.all_to_all_single(received, sent, group=group)
    rows = chosen.new_empty(ranks, layout.parts)
    own = received[:, 1].sum(0).repeat(ranks)
    dist.all_to_all_single(rows.view(-1), own, group=group)  # 2.13 renames all-gather and warns of its old name
    return _on_host(torch.stack((sent[:, 0], received[:, 0], rows)))


def _per_part(ranks: Tensor, layout: Layout) -> Tensor:
    """How often each rank occurs in each part of the tokens: ranks (tokens, copies) -> (ranks, parts) int64."""
    missing = layout.parts * layout.part - layout.tokens
    of_parts = F.pad(ranks, (0, 0, 0, missing), value=layout.ranks).view(layout.parts, -1, 1)
    return (of_parts == torch.arange(layout.ranks, device=ranks.device)).sum(1).t()


@exchange_counts.register_fake
def _(chosen: Tensor, ranks: int, experts: int, capacity: int, group_name: str) -> Tensor:
    layout = Layout(ranks, experts, chosen.shape[0], chosen.shape[1], capacity)
    return chosen.new_empty(3, ranks, layout.parts, device="cpu")


exchange_counts.register_autograd(lambda ctx, _: (None,) * 5)


def _on_host(counts: Tensor) -> Tensor:
    """The copy for which the host waits."""
    return counts.to("cpu", copy=True)
