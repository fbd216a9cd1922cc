"""Expert parallelism: tokens are dispatched to the ranks that have their experts, and the results are combined (all-to-all).

No token is dropped, and memory is bounded under any routing (all_to_all.py). The forward pass keeps what the backward pass
needs of the first two chunks. Other chunks, which only uneven routing makes, are dispatched and computed once more in the
backward pass, so that what is kept has a fixed size.

All of it is in operations of PyTorch's dispatcher, whose shapes do not depend on the routing: a block compiles as one graph,
and never recompiles. The weights of a token's experts multiply hidden values, before the last matmul, which is linear. So no
gradient needs the results of experts, each rank returns one sum for a token, and a recomputation can stop before combining.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.all_to_all import (
    KEPT,
    Arriving,
    Chunk,
    Layout,
    Pairs,
    Returning,
    Route,
    chunks,
    exchange_counts,
    hops_of,
    pack,
    rank_of,
    unpack,
)
from models.grouped import ACTIVATIONS, Activation, grouped_outer, grouped_product, grouped_sum
from models.once import once


class Rows(NamedTuple):
    """The tokens of a chunk that this rank has received, and their rows."""

    x: Tensor  # (tokens, dim)
    mix: Tensor  # (rows + 1,) float32: the weight of each row; the last is unwritten
    pairs: Pairs  # of the received tokens and this rank's experts

    def spread(self, x: Tensor, size: int) -> Tensor:
        """Copies x of each row's token: (size, ...). The end is unwritten: shapes must not depend on the routing."""
        result = x.new_empty(size, x.shape[1])
        torch.index_select(x, 0, self.pairs.tokens, out=result[: len(self.pairs.tokens)])
        return result

    def experts(self) -> Tensor:
        """The expert of each row, (rows,) int64."""
        counts = self.pairs.ends.diff(prepend=self.pairs.ends.new_zeros(1))
        numbers = torch.arange(len(counts), device=counts.device)
        return numbers.repeat_interleave(counts, output_size=len(self.pairs.tokens))

    def by_expert(self) -> Tensor:
        """The weights of experts, (tokens, experts); 0 for experts that a token has not chosen."""
        result = self.x.new_zeros(len(self.x), len(self.pairs.ends))
        return result.index_put_((self.pairs.tokens, self.experts()), self.mix[:-1].type_as(result))


class Weights(NamedTuple):
    """The parameters of a rank's experts, in the order of the operations' arguments: three matrices, and maybe their biases."""

    w1: Tensor  # (experts, hidden, dim)
    w2: Tensor  # (experts, dim, hidden)
    w3: Tensor  # (experts, hidden, dim)
    b1: Tensor | None = None  # (experts, hidden)
    b2: Tensor | None = None  # (experts, dim)
    b3: Tensor | None = None  # (experts, hidden)

    def gate_up(self, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The two matmuls before the activation."""
        return grouped_product(rows, self.w1, ends, True, self.b1), grouped_product(rows, self.w3, ends, True, self.b3)


class Layer(NamedTuple):
    """The arguments of the operations, and values derived from them."""

    tokens: Tensor  # (tokens, dim)
    chosen: Tensor  # (tokens, copies) int64
    mix: Tensor  # (tokens, copies) float32
    weights: Weights
    layout: Layout
    chunks: list[Chunk]
    rank: int  # of those that the experts are split over
    route: Route

    @classmethod
    def of(
        cls, tokens: Tensor, chosen: Tensor, mix: Tensor, counts: Tensor, weights: list[Tensor], capacity: int, groups: str
    ) -> "Layer":
        route, layout = Route.of(chosen, groups, len(weights[0])), layout_of(chosen, counts, weights, capacity, groups)
        rank = rank_of(route.hops)
        return cls(tokens, chosen, mix, Weights(*weights), layout, chunks(counts, layout, rank), rank, route)

    def dispatch_tokens(
        self, these: list[Chunk], into: list[Tensor] | None = None, relayed: list[Tensor] | None = None
    ) -> list[Arriving]:
        """Sends the tokens of chunks, with the numbers and weights of their experts.

        relayed: gets the numbers of the experts of tokens that this rank forwards, a tensor for each chunk.
        """

        def packed(this: Chunk) -> Tensor:
            part = slice(this.first, this.last)
            return pack(self.tokens[part], self.chosen[part].int(), self.mix[part])

        def relay(this: Chunk, passing: Tensor) -> None:
            numbers = self.unpacked(passing)[1]
            self.route.relay(this, numbers)
            if relayed is not None:
                relayed.append(numbers.clone())

        return self.route.dispatch(these, packed, into, relay)

    def unpacked(self, packed: Tensor) -> list[Tensor]:
        """What `dispatch_tokens` sends: x, the numbers of experts, and their weights."""
        return unpack(packed, self.tokens.shape[1], self.tokens.dtype, torch.int32, torch.float32)

    def received(self, arrived: Tensor, this: Chunk) -> Rows:
        """Unpacks what `dispatch_tokens` of all ranks has sent here."""
        experts = self.layout.experts
        x, numbers, mix = self.unpacked(arrived[: this.received])
        own = numbers - self.rank * experts
        pairs = Pairs.of(own.masked_fill((own < 0) | (own >= experts), experts), experts, this.rows)
        of_rows = mix.new_empty(this.rows + 1)
        torch.index_select(mix.flatten(), 0, pairs.chosen, out=of_rows[: this.rows])
        return Rows(x, of_rows, pairs)

    def relay_kept(self, kept: list[Tensor]) -> None:
        """Sorts what this rank forwards in the first two chunks. kept: of `dispatch_experts`."""
        begun = 0
        for this in self.chunks[: self.layout.kept_chunks] if len(self.route.hops) > 1 else ():
            self.route.relay(this, kept[1][begun : begun + this.relayed])
            begun += this.relayed

    def computed(self, kept: list[Tensor]) -> Iterator[tuple[Chunk, Rows, Tensor, Tensor]]:
        """Each chunk, what has arrived, and the first two matmuls. kept: of `dispatch_experts`."""
        arrived, _, *matmuls = kept
        for number, this in enumerate(self.chunks):
            if number < self.layout.kept_chunks:
                rows = self.received(arrived, this)
                arrived = arrived[this.received :]
                gate, up = (each[: this.rows + 1] for each in matmuls[2 * number :][:2])
                yield this, rows, gate, up
            else:
                rows = self.received(self.dispatch_tokens([this])[0].wait(), this)
                yield this, rows, *self.weights.gate_up(rows.spread(rows.x, this.rows + 1), rows.pairs.ends)


def layout_of(chosen: Tensor, counts: Tensor, weights: list[Tensor], capacity: int, groups: str) -> Layout:
    first, *others = hops_of(groups, len(weights[0]))
    nodes = first.receivers if others else 1
    return Layout(counts.shape[1], len(weights[0]), chosen.shape[0], chosen.shape[1], capacity, nodes)


def _arrived(tokens: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
    """An unwritten buffer for the packed tokens of the first two chunks."""
    width = pack(tokens[:0], chosen[:0].int(), chosen[:0].int()).shape[1]
    return tokens.new_empty(layout.kept_tokens, width, dtype=torch.int32)


def _relayed(chosen: Tensor, layout: Layout) -> Tensor:
    """An unwritten buffer for the numbers of the experts of tokens that this rank forwards in the first two chunks."""
    return chosen.new_empty(layout.kept_relayed, layout.copies, dtype=torch.int32)


# --------------------------------------------------------------------------------------------------------------- operations


@torch.library.custom_op("titanlite::dispatch_experts", mutates_args=())
def dispatch_experts(
    tokens: Tensor,
    chosen: Tensor,
    mix: Tensor,
    counts: Tensor,
    weights: list[Tensor],
    capacity: int,
    activation: str,
    groups: str,
) -> list[Tensor]:
    """Dispatches the tokens of the first two chunks, and computes the first two matmuls of their experts.

    tokens: (tokens, dim); chosen: (tokens, copies) int64; mix: the same shape, float32, the weights of the experts' results.
    counts: of `exchange_counts`. weights: `Weights` of this rank's experts. activation: of ACTIVATIONS. groups: of `hops_of`.

    -> what `combine_experts` takes as `through`, (tokens, dim), without values. For the backward pass: what has arrived,
    packed, the experts of tokens that this rank forwards, and both matmuls of each chunk, (room + 1, hidden). The ends of
    all are unwritten.
    """
    layer = Layer.of(tokens, chosen, mix, counts, weights, capacity, groups)
    first, arrived, numbers = layer.chunks[: layer.layout.kept_chunks], _arrived(tokens, chosen, layer.layout), list[Tensor]()
    begins = itertools.accumulate((this.received for this in first), initial=0)
    arriving = layer.dispatch_tokens(first, [arrived[begin:] for begin, _ in zip(begins, first, strict=False)], numbers)
    matmuls, relayed = list[Tensor](), _relayed(chosen, layer.layout)
    if numbers:
        torch.cat(numbers, out=relayed[: sum(map(len, numbers))])
    for this in first:
        rows = layer.received(arriving.pop(0).wait(), this)
        matmuls += layer.weights.gate_up(rows.spread(rows.x, layer.layout.room + 1), rows.pairs.ends)
    while len(matmuls) < 2 * layer.layout.kept_chunks:  # fewer chunks than there may be
        matmuls.append(torch.empty_like(matmuls[0]))
    return [tokens.new_empty(1, 1).expand(tokens.shape), arrived, relayed, *matmuls]


@torch.library.custom_op("titanlite::combine_experts", mutates_args=())
def combine_experts(
    through: Tensor,
    tokens: Tensor,
    chosen: Tensor,
    mix: Tensor,
    counts: Tensor,
    weights: list[Tensor],
    kept: list[Tensor],
    capacity: int,
    activation: str,
    groups: str,
) -> Tensor:
    """The weighted sum of the results of each token's experts, (tokens, dim).

    through, kept: of `dispatch_experts`. The other arguments are as there. The gradients of the sums are passed on to it as
    those of `through`: its backward pass is that of both, so this operation keeps nothing.
    """
    layer, act = Layer.of(tokens, chosen, mix, counts, weights, capacity, groups), ACTIVATIONS[activation]
    result = torch.empty_like(tokens)
    returning: list[Returning] = []

    def finish() -> None:
        this, _, sums = layer.route.passed_on(returning.pop(0), Pairs.sums)
        result[this.first : this.last] = layer.route.sent(this).sums(sums.wait())

    layer.relay_kept(kept)
    for this, rows, gate, up in layer.computed(kept):
        hidden = act.hidden(gate, up).mul_(rows.mix[:, None])
        results = grouped_product(hidden, layer.weights.w2, rows.pairs.ends, True, None)
        del hidden
        sums = rows.pairs.sums(results)
        if layer.weights.b2 is not None:
            sums.addmm_(rows.by_expert(), layer.weights.b2)
        returning.append(layer.route.back(sums, this))
        del results, sums, rows, gate, up  # before the next chunk has as much
        if len(returning) == KEPT:
            finish()
    for number, each in enumerate(returning):  # both before one is waited for
        returning[number] = layer.route.passed_on(each, Pairs.sums)
    while returning:
        finish()
    return result


@torch.library.custom_op("titanlite::experts_backward", mutates_args=())
def experts_backward(
    gradients: Tensor,
    tokens: Tensor,
    chosen: Tensor,
    mix: Tensor,
    counts: Tensor,
    weights: list[Tensor],
    kept: list[Tensor],
    capacity: int,
    trained: bool,
    activation: str,
    groups: str,
) -> list[Tensor]:
    """The gradients of tokens, of `mix`, and, if they are trained, of the weights.

    gradients: of the sums that `combine_experts` returns, whose arguments the others are.
    """
    layer = Layer.of(tokens, chosen, mix, counts, weights, capacity, groups)
    to_tokens, to_mix = torch.empty_like(tokens), torch.empty_like(mix)
    to_weights: list[Tensor | None] = [None] * len(weights) if trained else []
    returning: list[Returning] = []

    def dispatched(*these: Chunk) -> list[Arriving]:
        return layer.route.dispatch([*these], lambda this: gradients[this.first : this.last])

    def unpacked(back: Tensor) -> list[Tensor]:
        return unpack(back, tokens.shape[1], tokens.dtype, torch.float32)

    def packed_sums(pairs: Pairs, back: Tensor) -> Tensor:
        return pack(*map(pairs.sums, unpacked(back)))

    def finish() -> None:
        this, _, back = layer.route.passed_on(returning.pop(0), packed_sums)
        of_tokens, of_mix = unpacked(back.wait())
        pairs, part = layer.route.sent(this), slice(this.first, this.last)
        to_tokens[part] = pairs.sums(of_tokens)
        to_mix[part] = pairs.sums(of_mix)  # a rank returns zeros beside those of its own experts

    layer.relay_kept(kept)
    arriving = dispatched(*layer.chunks[:KEPT])
    for this, rows, gate, up in layer.computed(kept):
        gradient = (arriving or dispatched(this)).pop(0).wait()[:-1]
        back = _backward_of_chunk(gradient, rows, gate, up, layer.weights, to_weights, ACTIVATIONS[activation])
        returning.append(layer.route.back(back, this))
        del gradient, rows, gate, up, back
        if len(returning) == KEPT:
            finish()
    for number, each in enumerate(returning):
        returning[number] = layer.route.passed_on(each, packed_sums)
    while returning:
        finish()
    return [to_tokens, to_mix, *(each for each in to_weights if each is not None)]


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    """The first chunk's gradient of a weight is its `total`; others are added to it."""
    return more if total is None else total.add_(more)


def _backward_of_chunk(
    gradient: Tensor,
    rows: Rows,
    gate: Tensor,
    up: Tensor,
    weights: Weights,
    to_weights: list[Tensor | None],
    act: Activation,
) -> Tensor:
    """The gradients of received tokens and of their mix, packed; adds to those of weights, if there are any.

    gradient: of each received token's sum, (tokens, dim).
    """
    pairs, size, mix = rows.pairs, len(rows.mix), rows.mix[:, None]
    of_rows, hidden = rows.spread(gradient, size), act.hidden(gate, up)
    to_hidden = grouped_product(of_rows, weights.w2, pairs.ends, False, None)
    to_gate, to_up, of_mix = act.backward(to_hidden, hidden, gate, up, mix)
    del to_hidden
    if to_weights:
        to_weights[1] = _added(to_weights[1], grouped_outer(of_rows, hidden.mul_(mix), pairs.ends))
    del of_rows, hidden  # what follows needs as much
    if to_weights:
        x = rows.spread(rows.x, size)
        to_weights[0] = _added(to_weights[0], grouped_outer(to_gate, x, pairs.ends))
        to_weights[2] = _added(to_weights[2], grouped_outer(to_up, x, pairs.ends))
        del x
    if to_weights and weights.b2 is not None:
        to_biases = grouped_sum(to_gate, pairs.ends), rows.by_expert().t() @ gradient, grouped_sum(to_up, pairs.ends)
        to_weights[3:] = [_added(*each) for each in zip(to_weights[3:], to_biases, strict=True)]
    if weights.b2 is not None:
        of_mix[:-1] += (gradient @ weights.b2.t())[pairs.tokens, rows.experts()]
    to_mix = of_mix.new_zeros(pairs.positions.numel()).index_put_((pairs.chosen,), of_mix[:-1])
    to_rows = grouped_product(to_gate, weights.w1, pairs.ends, False, None)
    to_rows += grouped_product(to_up, weights.w3, pairs.ends, False, None)
    del to_gate, to_up
    return pack(pairs.sums(to_rows), to_mix.view_as(pairs.positions))


@dispatch_experts.register_fake
def _(tokens: Tensor, chosen: Tensor, mix: Tensor, counts: Tensor, weights: list[Tensor], capacity: int, *words: str) -> Any:
    layout, hidden = layout_of(chosen, counts, weights, capacity, words[-1]), weights[0].shape[1]
    matmuls = [tokens.new_empty(layout.room + 1, hidden) for _ in range(2 * layout.kept_chunks)]
    return [tokens.new_empty(1, 1).expand(tokens.shape), _arrived(tokens, chosen, layout), _relayed(chosen, layout), *matmuls]


@combine_experts.register_fake
def _(through: Tensor, tokens: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tokens)


@experts_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    _, tokens, _, mix, _, weights, _, _, trained, *_ = arguments  # those of experts_backward
    return [torch.empty_like(tokens), torch.empty_like(mix), *(torch.empty_like(weight) for weight in weights if trained)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tokens, chosen, mix, counts, weights, *ctx.words = inputs
    _, *kept = output
    ctx.save_for_backward(tokens, chosen, mix, counts, *kept, *weights)
    ctx.of_weights = len(weights)
    ctx.mark_non_differentiable(*kept)


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    tokens, chosen, mix, counts, *tensors = ctx.saved_tensors
    kept, weights = tensors[: -ctx.of_weights], tensors[-ctx.of_weights :]
    capacity, activation, groups = ctx.words
    trained = any(ctx.needs_input_grad[4])
    to_tokens, to_mix, *to_weights = experts_backward(
        gradients[0].contiguous(), tokens, chosen, mix, counts, weights, kept, capacity, trained, activation, groups
    )
    return to_tokens, None, to_mix, None, to_weights or [None] * len(weights), None, None, None


def _count_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.of_weights, ctx.of_kept = len(inputs[5]), len(inputs[6])


def _pass_on(ctx: Any, gradients: Tensor) -> tuple[Any, ...]:
    return gradients, None, None, None, None, [None] * ctx.of_weights, [None] * ctx.of_kept, None, None, None


dispatch_experts.register_autograd(_backward, setup_context=_keep)
combine_experts.register_autograd(_pass_on, setup_context=_count_inputs)


def exchanged_experts(
    tokens: Tensor,
    chosen: Tensor,
    mix: Tensor,
    weights: list[Tensor],
    ranks: int,
    capacity: int,
    activation: str,
    groups: str,
) -> Tensor:
    """The weighted sum of the results of each token's experts, which are split over `ranks` ranks; all three operations.

    tokens: (tokens, dim); chosen: (tokens, copies) int64; mix: the same shape, float32. weights: `Weights` of this rank's
    experts. capacity: the rows that a rank receives at a time. activation: of ACTIVATIONS. groups: of `hops_of`.

    -> (tokens, dim)
    """
    # once, because a fork's router may choose otherwise when recomputed, and counts belong to this choice
    tokens, chosen = tokens.contiguous(), once(lambda: chosen)
    counts = once(lambda: exchange_counts(chosen, ranks, len(weights[0]), capacity, groups))
    through, *kept = dispatch_experts(tokens, chosen, mix, counts, weights, capacity, activation, groups)
    return combine_experts(through, tokens, chosen, mix, counts, weights, kept, capacity, activation, groups)


@register_flop_formula(torch.ops.titanlite.dispatch_experts)
def _dispatch_flops(tokens: Any, chosen: Any, mix: Any, counts: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 4 * chosen[0] * chosen[1] * weights[0][1] * weights[0][2]  # shapes: as many rows arrive as leave, on average


@register_flop_formula(torch.ops.titanlite.combine_experts)
def _combine_flops(through: Any, tokens: Any, chosen: Any, mix: Any, counts: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * chosen[0] * chosen[1] * weights[0][1] * weights[0][2]


@register_flop_formula(torch.ops.titanlite.experts_backward)
def _backward_flops(*arguments: Any, **__: Any) -> int:
    _, _, chosen, _, _, weights, _, _, trained, *_ = arguments  # those of experts_backward, as shapes
    return (12 if trained else 6) * chosen[0] * chosen[1] * weights[0][1] * weights[0][2]
