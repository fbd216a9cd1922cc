"""Degrees -> one DeviceMesh with named dimensions. The code asks the mesh, never the world size.

The dimensions `pp, dp_replicate, dp_shard, cp, tp` always exist, with size 1 where unused. Batches are split over
dp_replicate x dp_shard, and each of their sequences over cp; parameters are sharded over dp_shard x cp (FSDP2) and tp.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.effects import Hardware, effective_when
from titanlite.config.schema import Config, Parallelism
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import concatenate, flatten

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_DIMENSIONS = ("dp_replicate", "dp_shard")  # ranks that read different samples
# Ranks whose losses are parts of the global batch's. Of a pipeline, only the last stage's is not 0.
LOSS_DIMENSIONS = ("pp", *DATA_DIMENSIONS, "cp")
WITHIN_A_REPLICA = ("dp_shard", "cp", "tp")  # ranks that share the parameters of a stage; each has its own tokens
WITHIN_A_STAGE = ("dp_replicate", *WITHIN_A_REPLICA)  # ranks that have the same layers
# dimension, or the split of experts -> its key in [parallelism]
DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def resolve_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """The size of every mesh dimension, with -1 replaced. Raises UserError where the product is not `world_size`."""
    sizes = {name: getattr(parallelism, DEGREES[name]) for name in DIMENSIONS}
    fixed = {name: size for name, size in sizes.items() if size > 0}
    product = math.prod(fixed.values())
    shown = {name: size for name, size in fixed.items() if size > 1 or name == "dp_shard"}
    names = " x ".join(f"parallelism.{DEGREES[name]} = {size}" for name, size in shown.items())
    if "dp_shard" in fixed and product != world_size:
        raise UserError(f"{names} needs {product} processes, and there are {world_size}")
    if world_size % product:
        raise UserError(f"{names} does not divide the number of processes, {world_size}")
    return sizes | {"dp_shard": fixed.get("dp_shard", world_size // product)}


def mesh_title(mesh: DeviceMesh) -> str:
    """ "dp_shard 2 x tp 2", or "one process"."""
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def needs_fsdp(config: Config, ranks: int) -> bool:
    """Whether FSDP2 is used: to gather, to offload, or to accumulate in another precision. Its keys need that."""
    return effective_when(Parallelism.model_fields["fsdp_prefetch"]).failing(config, Hardware(ranks=ranks)) is None


def reduces_once(config: Config) -> bool:
    """Whether gradients are reduced with the last microbatch of a step only."""
    return not config.parallelism.reduce_every_microbatch or config.parallelism.pipeline_parallel_degree > 1


def build_mesh(degrees: dict[str, int], device_type: str) -> DeviceMesh:
    """The mesh of all processes, which call this together. Tensor-parallel neighbors are adjacent ranks.

    degrees: those that are not 1; with "ep", which splits experts over ranks of other dimensions.
    """
    return init_device_mesh(device_type, tuple(degrees.get(name, 1) for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of `fully_shard`: ([replicas,] ranks that share the parameters)."""
    shards = mesh["dp_shard"] if mesh["cp"].size() == 1 else flatten(mesh["dp_shard", "cp"], "dp_shard_cp")
    return concatenate([mesh["dp_replicate"], shards]) if mesh["dp_replicate"].size() > 1 else shards


def data_degree(mesh: DeviceMesh) -> int:
    """The number of parts of a global batch."""
    return parts_of(_degrees_of(mesh))


def parts_of(degrees: dict[str, int]) -> int:
    """The number of parts of a global batch. degrees: those that are not 1."""
    return math.prod(degrees.get(name, 1) for name in DATA_DIMENSIONS)


def sequence_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that context and sequence parallelism split the same sequences over."""
    return flatten(mesh["cp", "tp"], "cp_tp")


def stage_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that have the same layers; None: all of them."""
    return flatten(mesh[WITHIN_A_STAGE], "within_a_stage").get_group() if mesh["pp"].size() > 1 else None


def ranks_of(degrees: dict[str, int]) -> int:
    """The number of ranks. degrees: those that are not 1; with "ep", which splits experts over ranks of other dimensions."""
    return math.prod(degrees.get(name, 1) for name in DIMENSIONS)


def data_rank(mesh: DeviceMesh) -> int:
    """The part of a global batch that this process reads."""
    return part_of_rank(_degrees_of(mesh), mesh.get_rank())


def part_of_rank(degrees: dict[str, int], rank: int) -> int:
    """The part of a global batch that a rank reads. degrees: of `resolve_degrees`."""
    return rank // (degrees["cp"] * degrees["tp"]) % parts_of(degrees)  # of DIMENSIONS, the last ones run fastest


def _degrees_of(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(DIMENSIONS, mesh.shape, strict=True))


def equal_parts(context: int, tensor: int) -> int:
    """Of a sequence: two for each rank of context parallelism, which balance causal attention, times the degree of tp."""
    return (2 * context if context > 1 else 1) * tensor


def rng_rank(mesh: DeviceMesh) -> int:
    """The number that seeds this process in a forward pass: one for each rank, as no two compute the same activations."""
    return mesh.get_rank()


def sum_over(dimensions: tuple[str, ...], tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of a tensor over the ranks of some dimensions, in place, on every rank."""
    for name in dimensions:
        if mesh[name].size() > 1:
            dist.all_reduce(tensor, group=mesh.get_group(name))
    return tensor


def split_dimension(shape: Sequence[int], ranks: int) -> int:
    """Which dimension of a parameter FSDP2 splits: the first, but for stacks of experts whose number the ranks do not divide.

    Of 8 experts on 64 ranks, 56 would hold nothing. Only the first dimension may be split unevenly.
    """
    return 1 if len(shape) == 3 and shape[0] % ranks and shape[1] % ranks == 0 else 0


def largest_share(shape: Sequence[int], ranks: int) -> float:
    """Of a parameter that FSDP2 splits, what the rank with the most has: one of 8 experts on 24 ranks, if these divide none."""
    size = shape[split_dimension(shape, ranks)]
    return math.ceil(size / ranks) / size


def faults(config: Config, ranks: int) -> Iterator[str]:
    """Sizes that the degrees do not divide. Raises UserError for degrees that do not fit the number of ranks."""
    training, parallelism = config.training, config.parallelism
    degrees = resolve_degrees(parallelism, ranks)
    context, tensor, shard, parts = degrees["cp"], degrees["tp"], degrees["dp_shard"] * degrees["cp"], parts_of(degrees)
    if (uneven := training.seq_len % equal_parts(context, tensor)) and context > 1:
        yield (
            f"parallelism.context_parallel_degree = {context}: training.seq_len = {training.seq_len} must be a multiple of "
            f"2 x {context} x tensor_parallel_degree = {equal_parts(context, tensor)}, the equal parts of a sequence"
        )
    elif uneven:
        yield f"parallelism.tensor_parallel_degree = {tensor}: does not divide training.seq_len = {training.seq_len}"
    experts, together = parallelism.expert_parallel_degree, math.prod(degrees[name] for name in WITHIN_A_REPLICA)
    if together % experts:
        yield (
            f"parallelism.expert_parallel_degree = {experts}: does not divide data_parallel_shard_degree x "
            f"context_parallel_degree x tensor_parallel_degree = {shard // context} x {context} x {tensor} = {together}"
        )
    one_pass, batch = training.local_batch_size * parts, config.global_batch(parts)
    if batch % one_pass:
        fewer = [count for count in range(1, parts) if batch % (training.local_batch_size * count) == 0]
        yield (
            f"training.global_batch_size = {batch}: must be a multiple of training.local_batch_size = "
            f"{training.local_batch_size} x {parts} data-parallel ranks = {one_pass}"
            f"{f'; of these ranks, at most {fewer[-1]} can share it' if fewer else ''}"
        )
