"""Degrees -> one DeviceMesh with named dimensions. The code asks the mesh, never the world size.

The dimensions `pp, dp_replicate, dp_shard, cp, tp` always exist, with size 1 where unused. Batches are split over
dp_replicate x dp_shard; parameters are sharded over dp_shard (FSDP2) and tp.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.effects import Place, effective_when
from titanlite.config.schema import Config, Parallelism
from titanlite.errors import UserError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_DIMENSIONS = ("dp_replicate", "dp_shard")


def resolve_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """The size of every mesh dimension, with -1 replaced. Raises UserError where the product is not `world_size`."""
    replicate = parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    tensor = parallelism.tensor_parallel_degree
    fixed = {"data_parallel_replicate_degree": replicate, "tensor_parallel_degree": tensor}
    if shard > 0:
        fixed["data_parallel_shard_degree"] = shard
    product = math.prod(fixed.values())
    names = " x ".join(f"{name} = {degree}" for name, degree in fixed.items())
    if shard > 0 and product != world_size:
        raise UserError(f"parallelism: {names} needs {product} processes, and there are {world_size}")
    if world_size % product:
        raise UserError(f"parallelism: {names} does not divide the number of processes, {world_size}")
    shard = world_size // (replicate * tensor)
    return {"pp": 1, "dp_replicate": replicate, "dp_shard": shard, "cp": 1, "tp": tensor}


def needs_fsdp(config: Config, ranks: int) -> bool:
    """Whether FSDP2 has something to gather, to fetch, or to accumulate in another precision: where its keys have an effect."""
    return effective_when(Parallelism.model_fields["fsdp_prefetch"]).failing(config, Place(ranks=ranks)) is None


def build_mesh(degrees: dict[str, int], device_type: str) -> DeviceMesh:
    """The mesh of `resolve_degrees`, over all processes. Tensor-parallel neighbours are adjacent ranks."""
    return init_device_mesh(device_type, tuple(degrees[name] for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)


def data_degree(mesh: DeviceMesh) -> int:
    """The number of parts of a global batch."""
    return mesh["dp_replicate"].size() * mesh["dp_shard"].size()


def data_rank(mesh: DeviceMesh) -> int:
    """The part of a global batch that this process reads."""
    return mesh["dp_replicate"].get_local_rank() * mesh["dp_shard"].size() + mesh["dp_shard"].get_local_rank()


def rng_rank(mesh: DeviceMesh) -> int:
    """Which random numbers this process draws in a forward pass: no two ranks compute the same activations."""
    return data_rank(mesh) * mesh["tp"].size() + mesh["tp"].get_local_rank()


def sum_over_data(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of a tensor over all data-parallel parts, in place, on every rank."""
    for name in DATA_DIMENSIONS:
        if mesh[name].size() > 1:
            dist.all_reduce(tensor, group=mesh.get_group(name))
    return tensor


def faults(config: Config, ranks: int) -> Iterator[str]:
    """Degrees that do not fit the number of ranks, and sizes that they do not divide."""
    training, parallelism = config.training, config.parallelism
    try:
        degrees = resolve_degrees(parallelism, ranks)
    except UserError as error:
        yield str(error)
        return
    tensor, shard, parts = degrees["tp"], degrees["dp_shard"], degrees["dp_replicate"] * degrees["dp_shard"]
    if training.seq_len % tensor:
        yield f"parallelism.tensor_parallel_degree = {tensor}: does not divide training.seq_len = {training.seq_len}"
    reshard = parallelism.fsdp_reshard_after_forward
    if isinstance(reshard, int) and (shard % reshard or reshard >= shard):
        yield (
            f"parallelism.fsdp_reshard_after_forward = {reshard}: must be smaller than data_parallel_shard_degree = {shard} "
            'and divide it, or be "default", "always" or "never"'
        )
    one_pass, batch = training.local_batch_size * parts, config.global_batch(parts)
    if batch % one_pass:
        yield (
            f"training.global_batch_size = {batch}: must be a multiple of training.local_batch_size = "
            f"{training.local_batch_size} x {parts} data-parallel ranks = {one_pass}"
        )
