"""What the operations of expert parallelism compute, send and hold: all that happens inside of them is hidden from modes of
PyTorch's dispatcher (models/exchange.py)."""

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from models.all_to_all import Hop, Layout, cuts_of, hops_of
from models.exchange import layout_of
from titanlite.ground.torch_private import disable_current_modes, packet

Routing = Literal["balanced", "worst"]
"""Rows for the experts of rank 0. "balanced": as many as for those of any other rank. "worst": as many of all tokens' rows as
rank 0 has experts, so all where a token has no more experts than a rank."""

_WAYS = {1: ("",), 2: (" between nodes", " within a node")}  # by the number of hops
_COUNTS, _DISPATCH, _COMBINE, _BACKWARD = (
    getattr(torch.ops.titanlite, name)
    for name in ("exchange_counts", "dispatch_experts", "combine_experts", "experts_backward")
)


class Message(NamedTuple):
    """All-to-alls of one kind in one call of an operation."""

    what: str
    group: str  # the name of the process group
    calls: int
    size: int  # bytes that this rank puts in, of which it may keep some
    sent: int  # bytes that go to other ranks


class Passed(NamedTuple):
    """Tokens in one hop. A token counts once for each rank that it goes to in this hop."""

    sent: int  # by this rank
    stay: int  # of these, the ones that it sends to itself
    received: int

    def minus(self, other: "Passed") -> "Passed":
        return Passed(*(ours - theirs for ours, theirs in zip(self, other, strict=True)))


class Load(NamedTuple):
    """What rank 0 does in some chunks."""

    chunks: int
    rows: int  # computed
    hops: tuple[Passed, ...]

    def minus(self, other: "Load") -> "Load":
        hops = tuple(ours.minus(theirs) for ours, theirs in zip(self.hops, other.hops, strict=True))
        return Load(self.chunks - other.chunks, self.rows - other.rows, hops)


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
    layout = layout_of(given["chosen"], given["counts"], given["weights"], given["capacity"], given["groups"])
    return Exchanged(layout, dim, hidden, element, *on_rank_0(routing, layout))


@functools.cache
def on_rank_0(routing: Routing, layout: Layout) -> tuple[Load, Load]:
    """What rank 0 does in all chunks and in those after the first two, on average. No other rank receives more rows."""
    every, of_node = layout.ranks * layout.experts, layout.ranks * layout.experts // layout.nodes
    here = layout.rows_of_token if routing == "worst" else 0  # rows of each token that are for rank 0 in any case

    def share(experts: int) -> float:
        """Of all tokens, those for some of so many experts, of another rank or node than rank 0's unless they choose freely."""
        return any_of(experts, every - layout.experts if here else every, layout.copies - here)

    own, rows = (1.0, layout.ranks * here) if here else (share(layout.experts), layout.copies)  # of one token of each rank
    with disable_current_modes():  # fake tensors have no values
        tokens = torch.tensor([min(layout.tokens, each * layout.part) for each in range(layout.parts + 1)])
        cuts = cuts_of(rows * tokens[None], layout)
        kept = int(tokens[cuts[min(layout.kept_chunks, len(cuts) - 1)]])

    def passed(tokens: int, receivers: int, own: float, other: float) -> Passed:
        """The tokens that rank 0 has in a hop: `own` of them are for itself or its node, `other` for each other one."""
        return Passed(round((own + (receivers - 1) * other) * tokens), round(own * tokens), round(receivers * own * tokens))

    def load(chunks: int, tokens: int) -> Load:
        if layout.nodes == 1:
            return Load(chunks, rows * tokens, (passed(tokens, layout.ranks, own, share(layout.experts)),))
        to_node = 1.0 if here else share(of_node)
        first = passed(tokens, layout.nodes, to_node, share(of_node))
        return Load(
            chunks,
            rows * tokens,
            (first, passed(layout.nodes * tokens, layout.ranks // layout.nodes, own, share(layout.experts))),
        )

    return load(len(cuts) - 1, layout.tokens), load(max(0, len(cuts) - 1 - layout.kept_chunks), layout.tokens - kept)


def any_of(own: int, every: int, chosen: int) -> float:
    """How likely one of `own` experts is among the `chosen` ones of a token, which are equally likely any of `every`."""
    return 1 - math.comb(every - own, chosen) / math.comb(every, chosen)


def temporary_bytes(operation: Any, given: dict[str, Any]) -> int:
    """What an operation allocates and frees, at the worst moment and with any routing; 0 for any other one.

    A chunk has at most `room` rows, each perhaps of a token of its own, and about half of the tokens of this rank. A relay
    receives and forwards at most as many.
    """
    found = exchanged(operation, given, "worst")
    if found is None:
        return 0
    layout, dim, hidden = found.layout, found.dim * found.itemsize, found.hidden * found.itemsize
    relays, rows, part = layout.nodes > 1, layout.room, layout.tokens // layout.kept_chunks
    sent = layout.tokens * min(layout.copies, layout.nodes if relays else layout.ranks) // layout.kept_chunks
    # to a relay; by it, or by the sender where there is none
    relayed, last = (min(rows, layout.nodes * layout.tokens), rows) if relays else (0, sent)
    arrived = min(rows, layout.ranks * layout.tokens)
    packed, returned = dim + 8 * layout.copies, dim + 4 * layout.copies
    integers = 8 * 5 * layout.copies * (part + relayed + arrived)
    # the first hops of both chunks and one second hop, or two of those; what they bring is in a buffer, or `bring`
    bring = 0 if packet(operation) is _DISPATCH else arrived
    both = max(2 * (sent + relayed) + last + bring, sent + relayed + 2 * (last + bring)) if relays else 2 * (sent + bring)
    which = packet(operation)
    if which is _DISPATCH:
        # while both chunks are on their way, no matmul has a result yet; during the first one, the second chunk still is
        flying = max(both * packed - 4 * rows * hidden, rows * dim + max(0, last * packed - 2 * rows * hidden))
        return flying + integers
    # an additional chunk arrives and is multiplied once more
    additional = found.later.chunks > 0
    again = arrived * packed + 2 * rows * hidden if additional else 0
    passing = sent + 2 * relayed if relays else 0  # sums that go on to their senders
    if which is _COMBINE:
        matmul = max(2 * rows * hidden, rows * (hidden + dim), (rows + arrived) * dim)
        both_return = (2 * (arrived + last) + passing + part) * dim
        comes = (sent + relayed + last + arrived) * packed if relays and additional else 0
        return max(again + max((arrived + last) * dim + matmul, both_return), (arrived + last) * dim + comes) + integers
    of_weight = layout.experts * found.dim * hidden if given["trained"] else 0
    activation = rows * (dim + (4 if given["activation"] == "swiglu" else 6) * hidden)
    matmuls = max(activation, rows * (dim + 3 * hidden) + of_weight, rows * 2 * (dim + hidden), (rows + 2 * arrived) * dim)
    computed = again + (arrived + last) * (dim + returned) + matmuls
    if relays:
        comes = again + (arrived + last) * returned + (sent + relayed + last + arrived) * (dim if again else 0)
        computed = max(computed, comes, both * dim, (2 * (arrived + last) + passing) * returned)
    return computed + integers


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
        return list(_counts(layout, hops_of(given["groups"], layout.experts), given["groups"].split(",")))
    found = exchanged(operation, given, routing)
    if found is None:
        return []
    layout, dim, groups = found.layout, found.dim * found.itemsize, given["groups"].split(",")
    names = [(number, group, way) for number, (group, way) in enumerate(zip(groups, _WAYS[len(groups)], strict=True))]
    packed = 4 * -(-dim // 4) + 8 * layout.copies

    def there(what: str, load: Load, size: int) -> Iterator[Message]:
        for number, group, way in names if load.chunks else ():
            sent, stay, _ = load.hops[number]
            yield Message(f"experts: {what}{way}", group, load.chunks, sent * size, (sent - stay) * size)

    def back(what: str, size: int) -> Iterator[Message]:
        """The way of all that has been received to the ranks that it is of, of which one is this."""
        for number, group, way in reversed(names):
            whole, receivers = size * found.every.hops[number].received, hops_of(given["groups"], 1)[number].receivers
            yield Message(f"experts: {what}{way}", group, found.every.chunks, whole, whole * (receivers - 1) // receivers)

    if which is _DISPATCH:
        return [*there("tokens", found.every.minus(found.later), packed)]
    again = there("tokens of additional chunks", found.later, packed)
    if which is _COMBINE:
        return [*again, *back("sums", dim)]
    of_tokens = back("gradients of tokens", packed - 4 * layout.copies)
    return [*again, *there("gradients of sums", found.every, dim), *of_tokens]


def _counts(layout: Layout, hops: list[Hop], groups: list[str]) -> Iterator[Message]:
    """The all-to-alls of one hop after the other, and of the all-gather of all loads."""
    of_part = 8 * layout.parts
    behind, gathered = layout.ranks, len(hops)
    sizes = [0] * len(hops)
    for number, hop in enumerate(hops):
        sizes[number] += of_part * (2 * behind + (hop.receivers if number < len(hops) - 1 else 0))
        behind //= hop.receivers
    for number in reversed(range(len(hops))):
        gathered *= hops[number].receivers
        sizes[number] += of_part * gathered
    for hop, group, way, size in zip(hops, groups, _WAYS[len(hops)], sizes, strict=True):
        yield Message(f"experts: counts{way}", group, 2, size, size * (hop.receivers - 1) // hop.receivers)
