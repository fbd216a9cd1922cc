"""What the two operations of expert parallelism compute, send and hold: all that happens inside of them is hidden from modes of
PyTorch's dispatcher (models/exchange.py)."""

import functools
from typing import Any, Literal, NamedTuple

import torch

from models.exchange import Load, taken
from titanlite.ground.torch_private import disable_current_modes, packet
from titanlite.plan.trace import spread

Routing = Literal["balanced", "worst"] | list[int]
"""Rows for the experts of rank 0. "balanced": as many as for those of any other rank. "worst": all rows of all ranks. A list:
the recorded rows of each expert; rank 0 is then the busiest rank, for which the others wait."""

_FORWARD, _BACKWARD = torch.ops.titanlite.exchanged_experts, torch.ops.titanlite.exchanged_experts_backward


class Message(NamedTuple):
    """All-to-alls of one kind in one call of an operation."""

    what: str
    calls: int
    size: int  # bytes that this rank puts in, of which it may keep some
    sent: int  # bytes that go to other ranks


class Sent(NamedTuple):
    """Rows of one rank that are in the same chunks."""

    rows: int
    stay: int  # of these, the ones for its own experts


class Exchanged(NamedTuple):
    """What an operation exchanges on rank 0."""

    load: Load
    every: Sent
    later: Sent  # in additional chunks


def exchanged(operation: Any, given: dict[str, Any], routing: Routing) -> Exchanged | None:
    """How much an operation with these arguments exchanges on rank 0; None for any other operation."""
    name = packet(operation)
    if name is not _FORWARD and name is not _BACKWARD:
        return None
    forward = name is _FORWARD
    w1, counts = given["weights"][0], given["counts"] if forward else given["counts"][0]
    experts, hidden, dim = w1.shape
    ranks, rows = len(counts) // experts if forward else len(counts), len(given["order"])
    capacity = given["capacity"] if forward else len(given["kept"][0])
    shares = {"balanced": (1,) * experts * ranks, "worst": (1, *[0] * (experts * ranks - 1))}
    own = shares[routing] if isinstance(routing, str) else tuple(routing)
    received, every, later = on_busiest_rank(own, rows, ranks, capacity)
    return Exchanged(Load(rows, received, capacity, ranks, experts, dim, hidden, w1.element_size()), every, later)


@functools.cache
def on_busiest_rank(shares: tuple[int, ...], rows: int, ranks: int, capacity: int) -> tuple[int, Sent, Sent]:
    """How many rows the busiest rank receives, and what it sends in all chunks and in those after the first.

    shares: of the experts. rows: of each rank. Row i of all rows, sorted by expert, is one of rank i % ranks: all send equal
    shares to each expert, up to one row.
    """
    with disable_current_modes():  # pretended tensors have no values
        ends = torch.tensor(spread(list(shares), rows * ranks)).cumsum(0)
        sent_until = (ends - torch.arange(ranks)[:, None] + ranks - 1) // ranks  # (senders, experts)
        counts = sent_until.diff(dim=1, prepend=ends.new_zeros(ranks, 1)).view(ranks, ranks, -1)
        received = counts.sum((0, 2))
        rank = int(received.argmax())
        sent, first = (each[rank].sum(1) for each in (counts, taken(counts, 0, capacity)))
        every, later = (Sent(int(each.sum()), int(each[rank])) for each in (sent, sent - first))
        return int(received[rank]), every, later


def temporary_bytes(operation: Any, given: dict[str, Any]) -> int:
    """What an operation allocates and frees, at the worst moment and with the worst routing; 0 for any other one."""
    found = exchanged(operation, given, "worst")
    if found is None:
        return 0
    load = found.load
    return load.forward_bytes() if "kept" not in given else load.backward_bytes(given["trained"])


def flops(load: Load, given: dict[str, Any]) -> int:
    """Of a call: each row meets three matrices, backward twice; the matmuls of additional chunks are recomputed."""
    matmul = 2 * load.dim * load.hidden
    if "kept" not in given:
        return 3 * matmul * load.received
    again = load.received - min(load.received, load.capacity)
    return matmul * ((6 if given["trained"] else 3) * load.received + 2 * again)


def messages(found: Exchanged, given: dict[str, Any]) -> list[Message]:
    """What rank 0 sends in a call. All ranks have as many rows."""
    load = found.load
    row, chunks = load.dim * load.itemsize, load.chunks
    away = load.ranks - 1

    def there(what: str, calls: int, sent: Sent) -> Message:
        return Message(what, calls, sent.rows * row, (sent.rows - sent.stay) * row)

    def back(what: str) -> Message:
        """The way of all received rows to the ranks that they are of, of which one is this."""
        size = load.received * row
        return Message(what, chunks, size, size * away // load.ranks)

    if "kept" not in given:
        counts = 8 * load.ranks * load.ranks * load.experts
        counted = Message("experts: counts of rows", 1, counts, counts * away // load.ranks)
        return [counted, there("experts: rows", chunks, found.every), back("experts: results")]
    gradients = [there("experts: gradients of results", chunks, found.every), back("experts: gradients of rows")]
    return [*gradients, there("experts: rows of additional chunks", chunks - 1, found.later)] if chunks > 1 else gradients
