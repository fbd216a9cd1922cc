"""titanlite estimate CONFIG.toml --ranks N [--device-memory-gib 80] [--section.key value ...]

What rank 0 of a run on N ranks will do and hold, found on one machine without a GPU: builds the whole model on the meta
device, shards it over a mesh of N pretended ranks, gives one layer its memory and initial weights for real, and follows
every allocation of a training step of a few layers on tensors without memory. The rest is multiplication. What the ranks
send each other in a step is reckoned from shapes.

Exit code 0 when the run fits the memory, 1 when it does not, 2 for a fault of the configuration.
"""

import argparse
import sys
import time
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.head import SIZES, Head
from titanlite.config.read import read_config
from titanlite.config.schema import Compile, Config
from titanlite.data.batch import Batch
from titanlite.errors import UserError
from titanlite.loop.checks import check
from titanlite.loop.loss import summed_loss
from titanlite.optim.state import state_bytes
from titanlite.parallel.mesh import build_mesh, data_degree, resolve_degrees
from titanlite.parallel.parallelize import parallelize
from titanlite.plan.communication import Transfer, lines, traffic
from titanlite.tools.check import parse_command
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.initialize import fill, match_initial, materialize
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import Family, family_of, tie
from titanlite.transforms.shards import local_part

GIB = 2**30
# What no allocation of ours shows: CUDA's context, NCCL's buffers, cuBLAS's workspace, gaps in the allocator's blocks.
RESERVE = 4 * GIB


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


class Estimate(NamedTuple):
    """Seconds of the parts that were done, and counts of what rank 0 keeps."""

    parameters: int  # of the whole model
    build_seconds: float
    shard_seconds: float
    layer_values: int  # values of one layer on rank 0
    layer_seconds: float
    local_values: int  # values of the whole model on rank 0
    memory: Memory
    traffic: list[Transfer] | str  # of one step; or why it is not known

    @property
    def initialize_seconds(self) -> float:
        """For the whole model, at the layer's speed."""
        return self.layer_seconds * self.local_values / self.layer_values


def estimate(config: Config, ranks: int) -> Estimate:
    """Times and measures rank 0 of `ranks` pretended ones. The process must not have a process group; it has none afterwards.

    Compilation is left out: a compiled block keeps less than what is counted here.
    """
    offload = config.parallelism.cpu_offload
    parallelism = config.parallelism.model_copy(update={"cpu_offload": False})
    attention = "math" if config.model.attention == "math" else "auto"  # the one kernel that keeps all scores
    model_keys = config.model.model_copy(update={"attention": attention})
    config = config.model_copy(update={"compile": Compile(), "parallelism": parallelism, "model": model_keys})
    family = family_of(config.model)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        begin = time.perf_counter()
        model = on_meta(family, config)
        parameters = sum(p.numel() for p in model.parameters())
        built = time.perf_counter()
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks), "cpu")
        model = parallelize(family, config, mesh, torch.device("cpu"))
        sharded = time.perf_counter()
        name, layer = next(iter(model.layers.items()))
        names = [f"layers.{name}.{key}" for key, _ in layer.named_parameters()]
        distributions, _ = match_initial(model, family)
        materialize(layer, torch.device("cpu"))
        for key, (_, parameter) in zip(names, layer.named_parameters(), strict=True):
            fill(parameter, key, distributions[key], config.training.seed)
        layer_seconds = time.perf_counter() - sharded
        local = _local_values(model)
        activations, working = measure_step(family, config, mesh)
        microbatches = config.global_batch(data_degree(mesh)) // (config.training.local_batch_size * data_degree(mesh))
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        trained = list(named.values())
        masters = 0 if offload else sum(local_part(p).numel() * p.element_size() for p in model.parameters())
        gradients = 0 if offload else sum(local_part(p).numel() * p.element_size() for p in trained)
        moments = (
            0 if offload else sum(local_part(p).numel() * state_bytes(name, p, config.optimizer) for name, p in named.items())
        )
        if microbatches > 1 and not parallelism.reduce_every_microbatch:
            # kept whole until the last microbatch, in the precision that they are summed in
            reduced = DTYPES[config.training.mixed_precision_reduce].itemsize
            gradients = reduced * sum(p.numel() for p in trained) // mesh["tp"].size()
        memory = Memory(masters, gradients, moments, activations, working)
        sent = _traffic(config, family, resolve_degrees(config.parallelism, ranks))
        return Estimate(parameters, built - begin, sharded - built, _local_values(layer), layer_seconds, local, memory, sent)
    finally:
        dist.destroy_process_group()


def _traffic(config: Config, family: Family, degrees: dict[str, int]) -> list[Transfer] | str:
    try:
        return traffic(config, family, degrees)
    except ValueError as error:
        return str(error)


def measure_step(family: Family, config: Config, mesh: DeviceMesh) -> tuple[int, int]:
    """(bytes that all layers keep for the backward pass, bytes beside at the peak) of one microbatch on rank 0.

    As many layers as it takes to see how checkpointing and prefetching repeat go through two microbatches, in the way the
    training loop does it, but on fake tensors. The second one is measured: gradients are there already. The attention and
    norm kernels are those of a CPU; CUDA's fused RMSNorm keeps less, which shows without activation checkpointing only.
    """
    keys = config.activation_checkpoint
    every = keys.selective_ac_option if keys.mode == "selective" and isinstance(keys.selective_ac_option, int) else 1
    depth = len(on_meta(family, config).layers)
    every = min(every, depth - 1)
    first = min(int(config.lora.enable), depth - 1 - every)  # no gradient of a frozen embedding: block 0 keeps less
    shown = min(depth, max(first + every, config.parallelism.fsdp_prefetch) + 1)
    model = parallelize(family, config, mesh, torch.device("cpu"), layers=shown)
    if isinstance(model.head, Head):
        model.head.sizes = SIZES["cuda"]
    follow, entered = Allocations(), []
    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda *_: entered.append(follow.live()))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tie(model)
        batch = Batch(torch.zeros(config.training.local_batch_size, config.training.seq_len + 1, dtype=torch.int64))
        with follow:
            summed_loss(model, batch).backward()
            entered.clear()
            before = follow.peak = follow.live()
            summed_loss(model, batch).backward()
    # From one block's entry to that of the block `every` later, both with their parameters gathered: what so many keep.
    kept = (entered[first + every] - entered[first]) / every if every else 0
    return round(kept * depth), round(follow.peak - before - kept * shown)


class Allocations(TorchDispatchMode):
    """Follows the memory of all tensors that operations return: `live()` bytes, and the `peak` of it since it was last set."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on the local tensors
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        alive = {key: storage for key, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def _local_values(module: nn.Module) -> int:
    return sum(local_part(p).numel() for p in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(prog="titanlite estimate", allow_abbrev=False, add_help=False)
    parser.add_argument("--device-memory-gib", type=float, default=80.0)
    own, words = parser.parse_known_args()
    try:
        path, ranks, _, options = parse_command("estimate", words)
        config = read_config(path, options)
        check(config, path, ranks)
        found = estimate(config, ranks)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{config.model.name} {config.model.flavor}, {found.parameters:,} parameters, on {ranks} ranks; this is rank 0")
    print(f"  built on meta           {found.build_seconds:8.2f} s")
    print(f"  sharded                 {found.shard_seconds:8.2f} s")
    print(f"  one layer initialised   {found.layer_seconds:8.2f} s  ({found.layer_values:,} values)")
    print(f"  whole model, estimated  {found.initialize_seconds:8.2f} s  ({found.local_values:,} values)")
    rows = {**found.memory._asdict(), "total": found.memory.total, "set aside for CUDA, NCCL": RESERVE}
    for name, size in rows.items():
        print(f"  {name:<24}{size / GIB:8.2f} GiB")
    print("  collectives of a step, and what this rank sends in them:")
    for line in [found.traffic] if isinstance(found.traffic, str) else lines(found.traffic):
        print(f"    {line}")
    fits = found.memory.total + RESERVE <= own.device_memory_gib * GIB
    print(f"  {'fits' if fits else 'does not fit'} a device of {own.device_memory_gib:g} GiB")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
