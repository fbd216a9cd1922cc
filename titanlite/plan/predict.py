"""From a configuration to what rank 0 of a run holds, computes and sends in a step, without the ranks.

All that a step holds, computes and sends is measured on a few layers, at least one of each kind, and counted for
each layer that is equal to one of them. Only Muon updates the whole model.
"""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Literal, NamedTuple

import torch

from titanlite.config.schema import Compile, Config
from titanlite.errors import phase
from titanlite.parallel.fsdp import Deferred, waiting_units
from titanlite.parallel.mesh import build_mesh, data_degree, resolve_degrees
from titanlite.parallel.parallelize import parallelize
from titanlite.plan.layers import Layers
from titanlite.plan.memory import unsharded
from titanlite.plan.record import Work, combine
from titanlite.plan.step import (
    Held,
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
    config, family = as_measured(config), family_of(config.model)
    with pretended_ranks(ranks):
        parameters = sum(p.numel() for p in on_meta(family, config).parameters())
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks), "cpu")
        model = parallelize(family, config, mesh, torch.device("cpu"))
        microbatches = config.microbatches(data_degree(mesh))
        layers, setup = Layers.of(model, family, config), Setup(family, config, mesh, device_type, routings(model, routing))
        held, host = measure_memory(setup, layers.few), 0
        if config.activation_checkpoint.mode == "full" and config.activation_checkpoint.offload:
            host, _ = whole_memory(layers, held)
            held = offloaded(held)
        activations, working = whole_memory(layers, held)
        # With a trace no two layers do the same.
        passes = measure_work(setup, layers.each() if isinstance(routing, Trace) else layers, microbatches)
        update = whole_update(layers, setup)
        masters, gradients = (sum(map(local_bytes, tensors)) for tensors in (model.parameters(), trained(model)))
        deferred, reduced = Deferred.of(config), DTYPES[config.training.mixed_precision_reduce].itemsize
        # What waits for the last microbatch is kept in the precision of the reduction, by FSDP2.
        if microbatches > 1 and deferred.shards:
            gradients = reduced * unsharded(config, model)
        elif microbatches > 1 and deferred.replicas and mesh["dp_replicate"].size() > 1:
            waiting = {id(p) for unit in waiting_units(model) for p in unit.parameters()}
            gradients = sum((reduced if id(p) in waiting else p.dtype.itemsize) * local_part(p).numel() for p in trained(model))
    states = (0, 0, 0) if offload else (masters, gradients, update.state)
    # Activations are gone when the optimizer begins.
    working = max(working, update.working - activations)
    work = combine(lambda *parts: sum(parts), passes, update.work)
    return Prediction(parameters, Memory(*states, activations, working), work, host)


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


def whole_memory(layers: Layers, held: Held) -> tuple[int, int]:
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
    peak = max(peak + more.get(place, 0) for place, peak in held.peaks.items())
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
