"""What the operations of expert parallelism compute, send and hold: all that happens inside of them is hidden from modes of
PyTorch's dispatcher (models/exchange.py)."""

import functools
import math
from typing import Any, Literal, NamedTuple

import torch

from models.all_to_all import Layout, cuts_of
from models.exchange import layout_of
from titanlite.ground.torch_private import disable_current_modes, packet

Routing = Literal["balanced", "worst"]
"""Rows for the experts of rank 0. "balanced": as many as for those of any other rank. "worst": as many of all tokens' rows as
rank 0 has experts, so all where a token has no more experts than a rank."""

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
    (_, hidden, dim), element = given["weights"][0].shape, given["weights"][0].element_size()
    layout = layout_of(given["chosen"], given["counts"], given["weights"], given["capacity"])
    return Exchanged(layout, dim, hidden, element, *on_rank_0(routing, layout))


@functools.cache
def on_rank_0(routing: Routing, layout: Layout) -> tuple[Load, Load]:
    """What rank 0 does in all chunks and in those after the first two, on average. No other rank receives more rows."""
    every, others = layout.ranks * layout.experts, layout.ranks - 1
    if routing == "worst":
        here = layout.rows_of_token  # rows of each token that are for rank 0
        stay, away = 1.0, others * _any_of(layout.experts, every - layout.experts, layout.copies - here)
        rows = layout.ranks * here  # of one token of each rank
    else:
        stay = _any_of(layout.experts, every, layout.copies)
        away, rows = others * stay, layout.copies
    with disable_current_modes():  # fake tensors have no values
        tokens = torch.tensor([min(layout.tokens, each * layout.part) for each in range(layout.parts + 1)])
        cuts = cuts_of(rows * tokens[None], layout)
        kept = int(tokens[cuts[min(layout.kept_chunks, len(cuts) - 1)]])

    def load(chunks: int, tokens: int) -> Load:
        received = layout.ranks * tokens
        return Load(chunks, round((stay + away) * tokens), round(stay * tokens), round(stay * received), rows * tokens)

    return load(len(cuts) - 1, layout.tokens), load(max(0, len(cuts) - 1 - layout.kept_chunks), layout.tokens - kept)


def _any_of(own: int, every: int, chosen: int) -> float:
    """How likely one of `own` experts is among the `chosen` ones of a token, which are equally likely any of `every`."""
    return 1 - math.comb(every - own, chosen) / math.comb(every, chosen)


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
