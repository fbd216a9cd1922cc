"""What the operations of expert parallelism compute, send and hold: all that happens inside of them is hidden from modes of
PyTorch's dispatcher (models/exchange.py)."""

import functools
from typing import Any, Literal, NamedTuple

import torch

from models.all_to_all import Layout, cuts_of
from models.exchange import layout_of
from titanlite.ground.torch_private import disable_current_modes, packet

Routing = Literal["balanced", "worst"] | list[int]
"""Rows for the experts of rank 0. "balanced": as many as for those of any other rank. "worst": all rows of all ranks. A list:
the recorded rows of each expert; rank 0 is then the busiest rank, for which the others wait."""

_COUNTS, _DISPATCH, _COMBINE, _BACKWARD = (
    getattr(torch.ops.titanlite, name)
    for name in ("exchange_counts", "dispatch_experts", "combine_experts", "experts_backward")
)


class Message(NamedTuple):
    """All-to-alls of one kind in one call of an operation."""

    what: str
    calls: int
    size: int  # bytes that this rank puts in, of which it may keep some
    sent: int  # bytes that go to other ranks


class Load(NamedTuple):
    """What rank 0 does in some chunks. A token counts once for each rank that it goes to."""

    chunks: int
    sent: int  # tokens of this rank
    stay: int  # of these, the ones for its own experts
    received: int  # tokens
    rows: int  # computed


class Exchanged(NamedTuple):
    """An operation's sizes, and what rank 0 does in all chunks and in those after the first two."""

    layout: Layout
    dim: int
    hidden: int
    itemsize: int  # bytes of a value
    every: Load
    later: Load


def exchanged(operation: Any, given: dict[str, Any], routing: Routing) -> Exchanged | None:
    """How much an operation with these arguments exchanges on rank 0; None for any other operation, and for that of counts."""
    if packet(operation) not in (_DISPATCH, _COMBINE, _BACKWARD):
        return None
    (experts, hidden, dim), element = given["weights"][0].shape, given["weights"][0].element_size()
    layout = layout_of(given["chosen"], given["counts"], given["weights"], given["capacity"])
    shares = {"balanced": (1,) * experts * layout.ranks, "worst": (1,) * experts + (0,) * experts * (layout.ranks - 1)}
    own = shares[routing] if isinstance(routing, str) else tuple(routing)
    return Exchanged(layout, dim, hidden, element, *on_busiest_rank(own, layout))


@functools.cache
def on_busiest_rank(shares: tuple[int, ...], layout: Layout) -> tuple[Load, Load]:
    """What the rank that receives most rows does in all chunks and in those after the first two, on average.

    shares: of the experts. All tokens choose alike, and an expert's share says nothing of which others a token has.
    """
    of_experts = [min(1.0, layout.copies * share / sum(shares)) for share in shares]  # how likely a token has each
    of_ranks = [of_experts[first:][: layout.experts] for first in range(0, len(shares), layout.experts)]
    reached, rows = [_any_of(each, of_experts, layout.copies) for each in of_ranks], [sum(each) for each in of_ranks]
    busiest = max(range(layout.ranks), key=rows.__getitem__)
    with disable_current_modes():  # fake tensors have no values
        tokens = torch.tensor([min(layout.tokens, each * layout.part) for each in range(layout.parts + 1)])
        cuts = cuts_of((torch.tensor(rows)[:, None] * layout.ranks * tokens).long(), layout)
        kept = int(tokens[cuts[min(layout.kept_chunks, len(cuts) - 1)]])

    def load(chunks: int, tokens: int) -> Load:
        received = layout.ranks * tokens
        return Load(
            chunks,
            round(sum(reached) * tokens),
            round(reached[busiest] * tokens),
            round(reached[busiest] * received),
            round(rows[busiest] * received),
        )

    return load(len(cuts) - 1, layout.tokens), load(max(0, len(cuts) - 1 - layout.kept_chunks), layout.tokens - kept)


def _any_of(own: list[float], every: list[float], copies: int) -> float:
    """How likely one of its own experts is among the `copies` experts of a token. own, every: how likely each one is.

    By Poisson sampling, on the condition that there are so many (Chen et al., "Weighted finite population sampling to maximize
    entropy", Biometrika 1994), with the odds of the unconditional one. With equal experts it is the hypergeometric one.
    """
    others = list(every)
    for each in own:
        others.remove(each)
    return 1 - _ways(others, copies) / _ways(every, copies)


def _ways(likely: list[float], copies: int) -> float:
    """The elementary symmetric polynomial of degree `copies` of the odds."""
    sums = [1.0] + [0.0] * copies
    for each in likely:
        odds = max(each, 1e-12) / max(1 - each, 1e-6)
        for degree in range(copies, 0, -1):
            sums[degree] += odds * sums[degree - 1]
    return sums[copies]


def temporary_bytes(operation: Any, given: dict[str, Any]) -> int:
    """What an operation allocates and frees, at the worst moment and with any routing; 0 for any other one.

    A chunk has at most `room` rows, each perhaps of a token of its own, and about half of the tokens of this rank.
    """
    found = exchanged(operation, given, "worst")
    if found is None:
        return 0
    layout, dim, hidden = found.layout, found.dim * found.itemsize, found.hidden * found.itemsize
    rows, sent = layout.room, layout.tokens * min(layout.copies, layout.ranks) // layout.kept_chunks
    arrived = min(rows, layout.ranks * layout.tokens)
    packed, returned = dim + 8 * layout.copies, dim + 4 * layout.copies
    integers = 8 * 5 * layout.copies * (layout.tokens // layout.kept_chunks + arrived)
    which = packet(operation)
    if which is _DISPATCH:
        # while both chunks are on their way, no matmul has a result yet; during the first one, the second chunk still is
        flying = max(2 * sent * packed - 4 * rows * hidden, rows * dim + max(0, sent * packed - 2 * rows * hidden))
        return flying + integers
    # an additional chunk arrives and is multiplied once more
    again = arrived * packed + 2 * rows * hidden if found.later.chunks else 0
    if which is _COMBINE:
        matmul = max(2 * rows * hidden, rows * (hidden + dim), (rows + arrived) * dim)
        both_return = (2 * (arrived + sent) + layout.tokens // layout.kept_chunks) * dim
        return again + max((arrived + sent) * dim + matmul, both_return) + integers
    of_weight = layout.experts * found.dim * hidden if given["trained"] else 0
    activation = rows * (dim + (4 if given["activation"] == "swiglu" else 6) * hidden)
    matmuls = max(activation, rows * (dim + 3 * hidden) + of_weight, rows * 2 * (dim + hidden), (rows + 2 * arrived) * dim)
    return again + (arrived + sent) * (dim + returned) + matmuls + integers


def flops(operation: Any, given: dict[str, Any], routing: Routing) -> int:
    """Of a call: each row meets three matrices, backward twice; the matmuls of additional chunks are recomputed."""
    which, found = packet(operation), exchanged(operation, given, routing)
    if found is None:
        return 0
    matmul = 2 * found.dim * found.hidden
    if which is _DISPATCH:
        return 2 * matmul * (found.every.rows - found.later.rows)
    again = 2 * matmul * found.later.rows
    if which is _COMBINE:
        return matmul * found.every.rows + again
    return matmul * (6 if given["trained"] else 3) * found.every.rows + again


def messages(operation: Any, given: dict[str, Any], routing: Routing) -> list[Message]:
    """What rank 0 sends in a call of one of the four operations. All ranks have as many tokens."""
    which = packet(operation)
    if which is _COUNTS:
        tokens, copies = given["chosen"].shape
        layout = Layout(given["ranks"], given["experts"], tokens, copies, given["capacity"])
        size, away = 8 * layout.ranks * layout.parts, layout.ranks - 1
        return [Message("experts: counts", 2, 3 * size, 3 * size * away // layout.ranks)]
    found = exchanged(operation, given, routing)
    if found is None:
        return []
    layout, dim = found.layout, found.dim * found.itemsize
    packed = 4 * -(-dim // 4) + 8 * layout.copies
    kept = Load(*(every - later for every, later in zip(found.every, found.later, strict=True)))

    def there(what: str, load: Load, size: int) -> list[Message]:
        return [Message(what, load.chunks, load.sent * size, (load.sent - load.stay) * size)] if load.chunks else []

    def back(what: str, size: int) -> Message:
        """The way of all that has been received to the ranks that it is of, of which one is this."""
        size *= found.every.received
        return Message(what, found.every.chunks, size, size * (layout.ranks - 1) // layout.ranks)

    if which is _DISPATCH:
        return there("experts: tokens", kept, packed)
    again = there("experts: tokens of additional chunks", found.later, packed)
    if which is _COMBINE:
        return [*again, back("experts: sums", dim)]
    of_tokens = back("experts: gradients of tokens", packed - 4 * layout.copies)
    return [*again, *there("experts: gradients of sums", found.every, dim), of_tokens]
