"""Expert parallelism: tokens are dispatched to the ranks that have their experts, and the results are combined (all-to-all).

No token is dropped, and memory is bounded under any routing. A rank receives at most `capacity` rows at a time; what exceeds
that follows in additional chunks, of which all ranks compute the same number from the same counts. The backward pass finds what
it needs of the first chunk; additional chunks are dispatched and recomputed, so what is kept has one size. Everything is
one operation of PyTorch's dispatcher, whose shapes do not depend on the routing: a block compiles as one graph, and never
again. The host waits for the device once a layer and forward pass, for the counts: the sizes of messages must be numbers.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.grouped import ACTIVATIONS, grouped_outer, grouped_product, grouped_sum
from models.torch_private import resolve_process_group


class Counts(NamedTuple):
    """How many rows go from each rank to each expert: (senders, receivers, experts of a receiver) int64, on device and host."""

    on_device: Tensor
    on_host: Tensor


class Chunk(NamedTuple):
    """What this rank sends and receives at a time."""

    segments: list[tuple[int, int]]  # for each receiver (first, last) of this rank's rows
    gives: list[int]  # rows to each rank
    takes: list[int]  # rows from each rank
    by_expert: Tensor  # (rows,) int64: indices of the received rows, sorted by expert and then by sender
    ends: Tensor  # (experts,) int32: where each expert's received rows end


def taken(counts: Tensor, first: int, last: int) -> Tensor:
    """The part of the counts that is in a chunk, which is rows `first` to `last` of what each receiver receives in all.

    That is ordered by expert and then by sender, so that most experts are in one chunk, and what a rank sends to another in
    one chunk is a run of its rows.
    """
    of_receiver = counts.permute(1, 2, 0)  # (receivers, experts, senders)
    ends = of_receiver.flatten(1).cumsum(1).view_as(of_receiver)
    return (ends.clamp(first, last) - (ends - of_receiver).clamp(first, last)).permute(2, 0, 1)


def chunks(counts: Counts, rank: int, capacity: int) -> Iterator[Chunk]:
    """At least one chunk; as many for all ranks, since they take part in each other's."""
    senders, _, experts = counts.on_host.shape
    own = counts.on_host[rank].sum(1).cumsum(0).tolist()
    nexts = [0, *own[:-1]]  # of this rank's rows for each receiver, the first that has not been sent
    most = int(counts.on_host.sum((0, 2)).max())
    for first in range(0, max(1, most), capacity):
        host, device = (taken(each, first, first + capacity) for each in (counts.on_host, counts.on_device))
        gives: list[int] = host[rank].sum(1).tolist()
        takes: list[int] = host[:, rank].sum(1).tolist()
        segments = [(start, start + size) for start, size in zip(nexts, gives, strict=True)]
        nexts = [last for _, last in segments]
        received = device[:, rank]  # (senders, experts): the rows arrive in this order
        expert = torch.arange(experts, device=received.device).repeat(senders)
        experts_of_rows = expert.repeat_interleave(received.flatten(), output_size=sum(takes))
        by_expert = experts_of_rows.argsort(stable=True)
        yield Chunk(segments, gives, takes, by_expert, received.sum(0).cumsum(0).int())


def _send(rows: Tensor, this: Chunk, group: Any, room: int) -> Tensor:
    """Rows of this rank, one run for each receiver -> those that it receives, sorted by expert; (room, ...), the end unwritten.

    An operation's shapes must not depend on the routing, and what the first chunk keeps is a result of one.
    """
    arrived = rows.new_empty(sum(this.takes), rows.shape[1])
    dist.all_to_all_single(arrived, rows, this.takes, this.gives, group=group)
    received = rows.new_empty(room, rows.shape[1])
    torch.index_select(arrived, 0, this.by_expert, out=received[: len(arrived)])
    return received


def _return(rows: Tensor, this: Chunk, group: Any) -> Tensor:
    """The way back of `_send`, to the order in which this rank sent."""
    arrived = torch.empty_like(rows)
    arrived[this.by_expert] = rows
    returned = rows.new_empty(sum(this.gives), rows.shape[1])
    dist.all_to_all_single(returned, arrived, this.gives, this.takes, group=group)
    return returned


def _pick(x: Tensor, this: Chunk) -> Tensor:
    """What of x, with a row for each of this rank's rows, is sent in a chunk."""
    return torch.cat([x[first:last] for first, last in this.segments])


def _put(result: Tensor, rows: Tensor, this: Chunk) -> None:
    """The inverse of `_pick`, in place."""
    for (first, last), part in zip(this.segments, rows.split(this.gives), strict=True):
        result[first:last] = part


class Weights(NamedTuple):
    """Of the experts of a rank, in the order of the operations' arguments: three matrices of each, and maybe their biases."""

    w1: Tensor  # (experts, hidden, dim)
    w2: Tensor  # (experts, dim, hidden)
    w3: Tensor  # (experts, hidden, dim)
    b1: Tensor | None = None  # (experts, hidden)
    b2: Tensor | None = None  # (experts, dim)
    b3: Tensor | None = None  # (experts, hidden)

    def gate_up(self, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The results of the two matmuls that the activation takes."""
        return grouped_product(rows, self.w1, ends, True, self.b1), grouped_product(rows, self.w3, ends, True, self.b3)

    def results(self, hidden: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(hidden, self.w2, ends, True, self.b2)


@torch.library.custom_op("titanlite::exchanged_experts", mutates_args=())
def exchanged_experts(
    tokens: Tensor,
    order: Tensor,
    counts: Tensor,
    weights: list[Tensor],
    copies: int,
    capacity: int,
    activation: str,
    group_name: str,
) -> list[Tensor]:
    """The result of each row's expert, which may be on another rank.

    tokens: (tokens, dim), of which row i is `order[i] // copies`; order: (n,) int64, sorted by expert. counts: (all experts,)
    int64, of this rank's rows. weights: `Weights` of this rank's experts. capacity: the rows that a rank receives at a time.
    activation: of ACTIVATIONS.

    -> the results, (n, dim). For the backward pass: the first chunk's rows and both matmuls with them, (capacity, ...), of
    which the end may be unwritten; the `Counts`.
    """
    group = _group(group_name)
    every = _counts_of_all(counts, group)
    results = tokens.new_empty(len(order), tokens.shape[1])
    kept: list[Tensor] = []
    for this in chunks(every, group.rank(), capacity):
        computed = _forward_round(this, group, results, tokens, order, Weights(*weights), copies, capacity, activation)
        kept = kept or computed
        del computed  # before the next chunk has as much
    return [results, *kept, *every]


def _forward_round(
    this: Chunk,
    group: Any,
    results: Tensor,
    tokens: Tensor,
    order: Tensor,
    weights: Weights,
    copies: int,
    capacity: int,
    activation: str,
) -> list[Tensor]:
    """Writes a chunk's part of the results -> what the backward pass needs of it."""
    act = ACTIVATIONS[activation]
    rows = _send(tokens[_pick(order, this) // copies], this, group, capacity)
    gate, up = weights.gate_up(rows, this.ends)
    received = sum(this.takes)
    hidden = act.hidden(gate[:received], up[:received])
    _put(results, _return(weights.results(hidden, this.ends), this, group), this)
    return [rows, gate, up]


@torch.library.custom_op("titanlite::exchanged_experts_backward", mutates_args=())
def exchanged_experts_backward(
    gradients: Tensor,
    tokens: Tensor,
    order: Tensor,
    weights: list[Tensor],
    kept: list[Tensor],
    counts: list[Tensor],
    copies: int,
    trained: bool,
    activation: str,
    group_name: str,
) -> list[Tensor]:
    """The gradients of tokens and, if they are trained, of the weights.

    gradients: of the results, (n, dim). weights: `Weights`. kept, counts: as returned by `exchanged_experts`.
    """
    group = _group(group_name)
    to_rows = gradients.new_empty(gradients.shape)
    to_weights = [torch.zeros_like(weight) for weight in weights] if trained else []
    for number, this in enumerate(chunks(Counts(*counts), group.rank(), len(kept[0]))):
        of_first = [] if number else kept
        _backward_round(
            this, group, to_rows, to_weights, gradients, tokens, order, Weights(*weights), of_first, copies, activation
        )
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return [to_rows[inverse].unflatten(0, (-1, copies)).sum(dim=1), *to_weights]


def _backward_round(
    this: Chunk,
    group: Any,
    to_rows: Tensor,
    to_weights: list[Tensor],
    gradients: Tensor,
    tokens: Tensor,
    order: Tensor,
    weights: Weights,
    kept: list[Tensor],
    copies: int,
    activation: str,
) -> None:
    """Writes a chunk's part of the gradients of rows, and adds to those of weights, if any. kept: of the first chunk."""
    act = ACTIVATIONS[activation]
    received = sum(this.takes)
    if kept:
        rows, gate, up = (each[:received] for each in kept)
    else:
        rows = _send(tokens[_pick(order, this) // copies], this, group, received)
        gate, up = weights.gate_up(rows, this.ends)
    gradient = _send(_pick(gradients, this), this, group, received)
    if to_weights:
        to_weights[1] += grouped_outer(gradient, act.hidden(gate, up), this.ends)
    to_hidden = grouped_product(gradient, weights.w2, this.ends, False, None)
    to_gate, to_up = act.backward(to_hidden, gate, up)
    if to_weights and weights.b1 is not None:
        for to_bias, gradients_of in zip(to_weights[3:], (to_gate, gradient, to_up), strict=True):
            to_bias += grouped_sum(gradients_of, this.ends)
    del gradient, to_hidden  # the way back needs as much
    if to_weights:
        to_weights[0] += grouped_outer(to_gate, rows, this.ends)
        to_weights[2] += grouped_outer(to_up, rows, this.ends)
    to_received = grouped_product(to_gate, weights.w1, this.ends, False, None)
    to_received += grouped_product(to_up, weights.w3, this.ends, False, None)
    _put(to_rows, _return(to_received, this, group), this)


@exchanged_experts.register_fake
def _(
    tokens: Tensor,
    order: Tensor,
    counts: Tensor,
    weights: list[Tensor],
    copies: int,
    capacity: int,
    activation: str,
    group_name: str,
) -> list[Tensor]:
    experts, hidden, dim = weights[0].shape
    ranks = len(counts) // experts
    every = counts.new_empty(ranks, ranks, experts)
    rows = [tokens.new_empty(capacity, size) for size in (dim, hidden, hidden)]
    return [tokens.new_empty(len(order), dim), *rows, every, torch.empty_like(every, device="cpu")]


@exchanged_experts_backward.register_fake
def _(
    gradients: Tensor,
    tokens: Tensor,
    order: Tensor,
    weights: list[Tensor],
    kept: list[Tensor],
    counts: list[Tensor],
    copies: int,
    trained: bool,
    activation: str,
    group_name: str,
) -> list[Tensor]:
    return [torch.empty_like(tokens), *(torch.empty_like(weight) for weight in weights if trained)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tokens, order, _, weights, ctx.copies, _, ctx.activation, ctx.group_name = inputs
    _, *kept = output
    ctx.save_for_backward(tokens, order, *kept, *weights)
    ctx.mark_non_differentiable(*kept)


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    tokens, order, *tensors = ctx.saved_tensors
    trained = any(ctx.needs_input_grad[3])
    kept, counts, weights = tensors[:3], tensors[3:5], tensors[5:]
    to_tokens, *to_weights = exchanged_experts_backward(
        gradients[0].contiguous(), tokens, order, weights, kept, counts, ctx.copies, trained, ctx.activation, ctx.group_name
    )
    return to_tokens, None, None, to_weights or [None] * len(weights), None, None, None, None


exchanged_experts.register_autograd(_backward, setup_context=_keep)


class Load(NamedTuple):
    """How much an exchange is on one rank: in rows, which have `dim` or `hidden` values."""

    rows: int  # of this rank
    received: int  # by this rank, in all chunks; no other rank receives more
    capacity: int  # what it receives at a time
    ranks: int
    experts: int  # of each rank
    dim: int
    hidden: int
    itemsize: int  # bytes of a value

    @property
    def chunks(self) -> int:
        return max(1, -(-self.received // self.capacity))

    def forward_bytes(self) -> int:
        """The most that `exchanged_experts` allocates at a time, beside its results.

        Its last matmul is the worst moment. There are then: the hidden values of the received rows, their results in two
        orders, and what has returned to this rank; unless the hidden values, of which an activation makes two, are much wider.
        Of the first chunk the rows and both matmuls are results. An additional chunk has its own, but not together with
        another additional one, so that more chunks take no more.
        """
        received, returned = self._of_a_chunk()
        again = self.capacity * (self.dim + 2 * self.hidden) if self.chunks > 1 else 0
        last_matmul = received * (self.hidden + 2 * self.dim) + returned * self.dim
        values = again + max(2 * received * self.hidden, last_matmul)
        return values * self.itemsize + self._indices()

    def backward_bytes(self, trained: bool) -> int:
        """The same of `exchanged_experts_backward`.

        All the while there are the gradients of all rows in the order of sending, and at the end in that of tokens too. Before,
        in each chunk, there are those of the received rows, of their hidden values, of both matmuls, with what these need; or
        a matmul that is added to the gradient of a weight; or those of the received rows in two orders, and what has returned
        to this rank. An additional chunk computes its rows and both matmuls again.
        """
        received, returned = self._of_a_chunk()
        again = received * (self.dim + 2 * self.hidden) if self.chunks > 1 else 0
        of_weight = self.experts * self.dim * self.hidden if trained else 0
        of_matmuls = received * self.dim + max(3 * received * self.hidden + of_weight, 4 * received * self.hidden)
        way_back = 2 * received * (self.dim + self.hidden) + returned * self.dim
        values = self.rows * self.dim + max(again + max(of_matmuls, way_back), self.rows * self.dim)
        return values * self.itemsize + self._indices() + 3 * 8 * self.rows

    def _of_a_chunk(self) -> tuple[int, int]:
        """(rows that this rank receives, rows that return to it) in one chunk at most."""
        return min(self.received, self.capacity), min(self.rows, self.ranks * self.capacity)

    def _indices(self) -> int:
        """Integers of 8 bytes: of each row that is received, in two chunks, or sent; and counts, while they are divided."""
        received, sent = self._of_a_chunk()
        return 8 * (5 * received + 2 * sent + 16 * self.ranks**2 * self.experts)


@register_flop_formula(torch.ops.titanlite.exchanged_experts)
def _flops(tokens: Any, order: Any, counts: Any, weights: Any, *_: Any, **__: Any) -> int:
    return (
        6 * order[0] * weights[0][1] * weights[0][2]
    )  # shapes: each row meets three matrices; as many rows arrive, on average


@register_flop_formula(torch.ops.titanlite.exchanged_experts_backward)
def _backward_flops(
    gradients: Any,
    tokens: Any,
    order: Any,
    weights: Any,
    kept: Any,
    counts: Any,
    copies: Any,
    trained: bool,
    *_: Any,
    **__: Any,
) -> int:
    w1 = weights[0]
    return (12 if trained else 6) * order[0] * w1[1] * w1[2]


def _group(name: str) -> Any:
    """PyTorch's operations name their groups too."""
    return resolve_process_group(name)


def _counts_of_all(counts: Tensor, group: Any) -> Counts:
    """The one place where the host waits for the device."""
    ranks = group.size()
    gathered = counts.new_empty(ranks * len(counts))
    dist.all_to_all_single(gathered, counts.repeat(ranks), group=group)  # 2.13 renames all-gather and warns of its old name
    gathered = gathered.view(ranks, ranks, -1)
    return Counts(gathered, gathered.to("cpu", copy=True))
