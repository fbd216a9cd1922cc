"""From a configuration to what rank 0 of a run holds, computes and sends in a step, without the ranks.

All that a step computes and sends is measured on two models of a few layers, whose difference is what the other layers add.
Only Muon updates the whole model.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from models.decoder import Decoder
from titanlite.config.schema import Compile, Config
from titanlite.parallel.fsdp import Deferred, waiting_units
from titanlite.parallel.mesh import build_mesh, data_degree, resolve_degrees
from titanlite.parallel.parallelize import parallelize
from titanlite.plan.record import Work, combine
from titanlite.plan.step import Setup, local_bytes, measure_memory, measure_update, measure_work, pretended_ranks, trained
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import family_of
from titanlite.transforms.shards import local_part

T = TypeVar("T")


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


def predict(config: Config, ranks: int, device_type: str = "cuda") -> Prediction:
    """What rank 0 of `ranks` will hold and do. The process must not have a process group; it has none afterwards.

    See `report.limits` for what is left out. device_type: "cuda" or "cpu", which differ in the number of chunks of the loss.
    """
    offload = config.parallelism.cpu_offload
    config, family = as_measured(config), family_of(config.model)
    with pretended_ranks(ranks):
        parameters = sum(p.numel() for p in on_meta(family, config).parameters())
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks), "cpu")
        model = parallelize(family, config, mesh, torch.device("cpu"))
        microbatches = config.global_batch(data_degree(mesh)) // (config.training.local_batch_size * data_degree(mesh))
        layers, setup = Depths.of(model, config), Setup(family, config, mesh, device_type)
        activations, working = layers.memory(*measure_memory(setup, layers.few))
        passes = layers.run(lambda depth: measure_work(setup, depth, microbatches))
        # Muon sends matrices in rounds, of which a few layers do not fill one.
        updated = layers._replace(few=layers.whole, more=layers.whole) if config.optimizer.name == "Muon" else layers
        updates = updated.run(lambda depth: measure_update(setup, depth))
        masters, gradients = (sum(map(local_bytes, tensors)) for tensors in (model.parameters(), trained(model)))
        deferred, reduced = Deferred.of(config), DTYPES[config.training.mixed_precision_reduce].itemsize
        # What waits for the last microbatch is kept in the precision of the reduction, by FSDP2.
        if microbatches > 1 and deferred.shards:
            gradients = reduced * sum(p.numel() for p in trained(model)) // mesh["tp"].size()
        elif microbatches > 1 and deferred.replicas and mesh["dp_replicate"].size() > 1:
            waiting = {id(p) for unit in waiting_units(model) for p in unit.parameters()}
            gradients = sum((reduced if id(p) in waiting else p.dtype.itemsize) * local_part(p).numel() for p in trained(model))
    states = (0, 0, 0) if offload else (masters, gradients, updated.extend(*(update.state for update in updates)))
    # Activations are gone when the optimizer begins.
    working = max(working, updated.extend(*(update.working for update in updates)) - activations)
    update = combine(updated.extend, *(update.work for update in updates))
    work = combine(lambda *parts: sum(parts), combine(layers.extend, *passes), update)
    return Prediction(parameters, Memory(*states, activations, working), work)


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


class Depths(NamedTuple):
    """How many layers to run so that those of the whole model follow."""

    whole: int
    first: int  # the layers from this one on are equal ...
    every: int  # ... but for checkpointing, which repeats after so many
    few: int
    more: int  # `every` more than `few`, or equal where the whole model is run

    @classmethod
    def of(cls, model: Decoder, config: Config) -> "Depths":
        kinds = [[(name, p.shape, p.requires_grad) for name, p in layer.named_parameters()] for layer in model.layers.values()]
        whole = len(kinds)
        first = next(number for number in range(whole) if all(kind == kinds[-1] for kind in kinds[number:]))
        if config.lora.enable:
            first = max(first, 1)  # no gradient of the frozen embedding is computed: layer 0 keeps and sends less
        keys = config.activation_checkpoint
        every = keys.selective_ac_option if keys.mode == "selective" and isinstance(keys.selective_ac_option, int) else 1
        ahead = config.parallelism.fsdp_prefetch
        few = max(first + every, ahead + 1 if ahead > 1 else 1) + 1  # gathers ahead go on while the second layer runs
        few += (whole - few) % every
        return cls(whole, first, every, *((few, few + every) if few + every <= whole else (whole, whole)))

    def run(self, measure: Callable[[int], T]) -> tuple[T, T]:
        """measure(few), measure(more)."""
        few = measure(self.few)
        return few, few if self.more == self.few else measure(self.more)

    def extend(self, few: int, more: int) -> int:
        """A number of the whole model, from those of `few` and of `more` layers."""
        return few + (self.whole - self.few) // self.every * (more - few)

    def memory(self, entered: list[int], peak: int) -> tuple[int, int]:
        """(bytes that all layers keep for the backward pass, bytes beside these at the peak), from those of `few` layers."""
        every = min(self.every, self.whole - 1)
        first = min(self.first, self.whole - 1 - every)
        # From one layer's entry to that of the layer `every` later, both with their parameters gathered: what so many keep.
        kept = (entered[first + every] - entered[first]) / every if every else 0
        return round(kept * self.whole), round(peak - kept * self.few)
