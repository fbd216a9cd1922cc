"""From a configuration to what rank 0 of a run holds, computes and sends in a step, without the ranks.

All that a step holds, computes and sends is measured on a few layers, at least one of each kind, and counted for
each layer that is equal to one of them. Only Muon updates the whole model.
"""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import torch

from models.decoder import Decoder
from titanlite.config.schema import Compile, Config
from titanlite.errors import phase
from titanlite.parallel.fsdp import Deferred, waiting_units
from titanlite.parallel.mesh import build_mesh, data_degree, resolve_degrees
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline import shares, stage_costs
from titanlite.plan import pipeline
from titanlite.plan.layers import Layers
from titanlite.plan.memory import unsharded
from titanlite.plan.record import Channel, Traffic, Work, combine
from titanlite.plan.step import (
    Held,
    Part,
    Setup,
    Update,
    local_bytes,
    measure_memory,
    measure_update,
    measure_work,
    pretended_ranks,
    trained,
)
from titanlite.plan.trace import Trace, routings
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import family_of
from titanlite.transforms.shards import local_part


class Memory(NamedTuple):
    """Bytes that rank 0 holds when it holds the most."""

    masters: int
    gradients: int  # of every trained parameter, as in the second microbatch of a step and at the end of any
    moments: int  # and all else that the optimizer keeps
    activations: int  # what all layers together keep from the forward pass for the backward pass
    working: int  # at the worst moment beside all that: gathered parameters, one layer's recomputation, logits, ...

    @property
    def total(self) -> int:
        return sum(self)


class Prediction(NamedTuple):
    """What rank 0 keeps and does."""

    parameters: int  # of the whole model
    memory: Memory
    work: Work  # of one step
    host: int  # bytes in the host's memory: inputs of blocks that activation_checkpoint.offload keeps there
    pipeline: str = ""  # which rank of a pipeline this is, and how long it waits


@phase("predicting a step")
def predict(
    config: Config, ranks: int, device_type: str = "cuda", routing: Literal["balanced", "worst"] | Trace = "balanced"
) -> Prediction:
    """What rank 0 of `ranks` will hold and do. The process must not have a process group; it has none afterwards.

    See `report.limits` for what is left out. device_type: "cuda" or "cpu", which differ in the number of chunks of the loss.
    routing: of rows to experts that are split over ranks, for what is computed and sent; memory suffices for any. With a Trace,
    rank 0 is in each layer the busiest rank. `check_trace` must have accepted it.
    """
    offload = config.parallelism.cpu_offload
    degree, whole = config.parallelism.pipeline_parallel_degree, as_measured(config)
    config, family = pipeline.flat(whole, memory=True) if degree > 1 else whole, family_of(whole.model)
    with pretended_ranks(ranks // degree):
        parameters = sum(p.numel() for p in on_meta(family, config).parameters())
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks // degree), "cpu")
        model, replicas = parallelize(family, config, mesh, torch.device("cpu")), mesh["dp_replicate"].size()
        microbatches = config.microbatches(data_degree(mesh))
        layers, setup = Layers.of(model, family, config), Setup(family, config, mesh, device_type, routings(model, routing))
        held, host = measure_memory(setup, layers.few), 0
        if config.activation_checkpoint.mode == "full" and config.activation_checkpoint.offload:
            host, _ = whole_memory(layers, held)
            held = offloaded(held)
        update = whole_update(layers, setup)
        run = layers.each() if isinstance(routing, Trace) else layers  # with a trace no two layers do the same
        measured = Measured(model, layers, run, held, update, microbatches)
        if degree > 1:
            setup = setup._replace(config=pipeline.flat(whole))
            parts = measure_work(setup, run, in_a_pipeline(microbatches), kept=pipeline.gathered_once(whole))
        else:
            # all microbatches but the last one are equal
            parts = measure_work(setup, run, [microbatches - 1, 1] if microbatches > 1 else [1])
    if degree > 1:
        return of_worst_rank(whole, ranks, parameters, measured, parts)
    activations, working = whole_memory(layers, held)
    passes = sum_of(parts, lambda place: run.times(place) if place in run.few else 1)
    masters, gradients = (sum(map(local_bytes, tensors)) for tensors in (model.parameters(), trained(model)))
    deferred, reduced = Deferred.of(config), DTYPES[config.training.mixed_precision_reduce].itemsize
    # What waits for the last microbatch is kept in the precision of the reduction, by FSDP2.
    if microbatches > 1 and deferred.shards:
        gradients = reduced * unsharded(config, model)
    elif microbatches > 1 and deferred.replicas and replicas > 1:
        waiting = {id(p) for unit in waiting_units(model) for p in unit.parameters()}
        gradients = sum((reduced if id(p) in waiting else p.dtype.itemsize) * local_part(p).numel() for p in trained(model))
    states = (0, 0, 0) if offload else (masters, gradients, update.state)
    # Activations are gone when the optimizer begins.
    working = max(working, update.working - activations)
    work = added(passes, update.work)
    return Prediction(parameters, Memory(*states, activations, working), work, host)


class Measured(NamedTuple):
    """What is known of a whole model on the ranks of one stage."""

    model: Decoder  # parallelized
    layers: Layers  # for memory
    run: Layers  # for work
    held: Held  # of a microbatch
    update: Update
    microbatches: int


def sum_of(parts: Iterable[Part], times: Callable[[str], int]) -> Work:
    """The work of a model that has each of the few layers so many times, and the head; times("head") and times("") too."""
    counted = [(times(part.place), part.work) for part in parts]
    return added(*(combine(lambda number, often=often: often * number, work) for often, work in counted))


def added(*works: Work) -> Work:
    return combine(lambda *numbers: sum(numbers), *works)


# ------------------------------------------------------------------------------------------------------------- a pipeline


def in_a_pipeline(microbatches: int) -> list[int]:
    """For how many microbatches of a step each one stands that is run: the first gathers, the last reduces."""
    return [1, microbatches - 2, 1] if microbatches > 2 else [1] * microbatches


def of_worst_rank(config: Config, ranks: int, parameters: int, measured: Measured, parts: list[Part]) -> Prediction:
    """The prediction of the rank of a pipeline that holds the most. config: with the pipeline."""
    model, layers, run, held, update, microbatches = measured
    training, degree = config.training, config.parallelism.pipeline_parallel_degree
    family = family_of(config.model)
    whole = on_meta(family, config)
    every = shares(config, family, whole)
    blocks = {number: names for share in every for number, names in share.stages.items()}
    cost = stage_costs(config, family, whole)
    degrees = resolve_degrees(config.parallelism, ranks)
    places = training.seq_len // (degrees["cp"] * degrees["tp"])
    assert model.head is not None
    hidden = (
        training.local_batch_size * places * model.head.output.in_features * DTYPES[training.mixed_precision_param].itemsize
    )
    kept = [sum(held.kept[layers.stands_for[name]] for name in blocks[number]) for number in sorted(blocks)]
    kept = [kept[0], *(of_blocks + hidden for of_blocks in kept[1:])]  # with what a later stage has received
    again = 3.0 if config.activation_checkpoint.mode == "full" else 2.0
    with pretended_ranks(degree):
        order = pipeline.orders(config, microbatches, len(blocks))
    rehearsal = pipeline.rehearse(order, cost, [again * each for each in cost], kept)
    all_masters = sum(map(local_bytes, model.parameters()))
    found: list[Prediction] = []
    for rank, share in enumerate(every):
        mine = {name: parameter for name, parameter in model.named_parameters() if share.has(name)}
        masters = sum(map(local_bytes, mine.values()))
        gradients = DTYPES[training.mixed_precision_reduce].itemsize * unsharded(config, whole, share)
        gathered = DTYPES[training.mixed_precision_param].itemsize * unsharded(config, whole, share, frozen=True)
        received = len(share.stages) - share.embed + len(share.stages) - share.head  # for each microbatch
        names = tuple(name for stage in share.stages.values() for name in stage)
        own = layers._replace(whole=names, stands_for={name: layers.stands_for[name] for name in names})
        _, working = whole_memory(own, held, with_head=share.head)
        activations = rehearsal.kept[rank] + 2 * hidden
        activations += gathered if pipeline.gathered_once(config) else 0
        part_of_all = masters / all_masters
        working = max(working, round(update.working * part_of_all) - activations)
        memory = Memory(masters, gradients, round(update.state * part_of_all), activations, working)

        ends = {"embed": int(share.embed), "head": int(share.head)}

        own = run._replace(whole=names, stands_for={name: run.stands_for[name] for name in names})

        def times(place: str, own: Layers = own, ends: dict[str, int] = ends) -> int:
            return own.times(place) if place in own.few else ends.get(place, 1)

        passes = sum_of(parts, times)
        passes = passes._replace(traffic={each: amount for each, amount in passes.traffic.items() if amount.calls})
        updated = {
            channel: Traffic(each.calls, round(each.size * part_of_all), round(each.sent * part_of_all))
            for channel, each in update.work.traffic.items()
        }
        sends = Traffic(received * microbatches, received * microbatches * hidden, received * microbatches * hidden)
        travels = Work(0, {Channel("pipeline: hidden states", "send", ("pp",), degree): sends})
        text = f"rank {rank} of {degree} in the pipeline, which holds the most; ranks wait {rehearsal.idle:.1%} of a step"
        work = added(passes, Work(round(update.work.flops * part_of_all), updated), travels)
        found.append(Prediction(parameters, memory, work, 0, text))
    return max(found, key=lambda prediction: prediction.memory.total)


def as_measured(config: Config) -> Config:
    """The same run without the compiler, without offloading, and with an attention kernel that this machine has."""
    attention = "math" if config.model.attention == "math" else "auto"  # the one kernel that keeps all scores
    return config.model_copy(
        update={
            "compile": Compile(),
            "model": config.model.model_copy(update={"attention": attention}),
            "parallelism": config.parallelism.model_copy(update={"cpu_offload": False, "enable_async_tensor_parallel": False}),
        }
    )


def offloaded(held: Held) -> Held:
    """The same where the host keeps the inputs of blocks: on the device are those of the block that runs, and of the next."""
    return Held(dict.fromkeys(held.kept, 0), {place: peak + max(held.kept.values()) for place, peak in held.peaks.items()})


def whole_memory(layers: Layers, held: Held, with_head: bool = True) -> tuple[int, int]:
    """(bytes that all layers keep for the backward pass, bytes beside these at the peak), from those of a few layers.

    Where a layer runs, the layers before it keep what they keep: the last layer of a kind comes on top of the most.
    """
    few, whole = (
        _sums(held.kept[name] for name in layers.few),
        _sums(held.kept[layers.stands_for[name]] for name in layers.whole),
    )
    last = {equal: place for place, equal in enumerate(layers.stands_for[name] for name in layers.whole)}
    more = {name: whole[last[name]] - few[place] for place, name in enumerate(layers.few) if name in last} | {
        "head": whole[-1] - few[-1]
    }
    absent = {*layers.few} - last.keys() | (set() if with_head else {"head"})
    peak = max(peak + more.get(place, 0) for place, peak in held.peaks.items() if place not in absent)
    return whole[-1], peak - whole[-1]


def whole_update(layers: Layers, setup: Setup) -> Update:
    """The update of the whole model, from those of one layer of each kind, and of one more."""
    measure = partial(measure_update, setup)
    if setup.config.optimizer.name == "Muon":  # which sends matrices in rounds, of which a few layers do not fill one
        return measure(layers.whole)
    ones, others = layers.add_up(measure)

    def extended(ones: int, *with_one_more: int) -> int:
        return ones + sum(count * (more - ones) for (count, _), more in zip(others, with_one_more, strict=True))

    every = ones, *(one_more for _, one_more in others)
    state, working = (extended(*numbers) for numbers in zip(*((each.state, each.working) for each in every), strict=True))
    return Update(state, working, combine(extended, *(each.work for each in every)))


def _sums(numbers: Iterable[int]) -> list[int]:
    """[0, the first, the sum of the first two, ...]"""
    return [0, *itertools.accumulate(numbers)]
