"""Before a run starts: what parameters, gradients and optimizer state take, by arithmetic; `predict` measures all the rest."""

from collections.abc import Iterator

import torch
from torch import nn

from models.decoder import Decoder
from models.moe import experts_of
from titanlite.config.schema import Config
from titanlite.loop.memory import GIB, machine_memory
from titanlite.loop.remedies import OFFLOAD, helps, spelled, ways
from titanlite.optim.state import state_bytes
from titanlite.parallel.mesh import largest_share, reduces_once, resolve_degrees
from titanlite.parallel.pipeline import StageAssignment, assign_stages
from titanlite.registry.check import Check
from titanlite.registry.family import family_of
from titanlite.registry.teacher import config_of_teacher
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta

_MORE_RANKS = [2**power for power in range(1, 13)]


def kept_bytes(config: Config, model: Decoder, ranks: int) -> int:
    """Bytes of parameters, gradients and optimizer state on each rank: the least that it holds. model: on the meta device.

    Raises UserError for a mesh that does not fit the ranks.
    """
    family = family_of(config.model)
    own = max(_kept_bytes(config, model, ranks, share) for share in assign_stages(config, family, model))
    if (cfg := config_of_teacher(config)) is None:
        return own
    return own + kept_bytes(cfg, on_meta(family_of(cfg.model), cfg).requires_grad_(False), ranks)


def _kept_bytes(config: Config, model: nn.Module, ranks: int, share: StageAssignment) -> int:
    degrees = resolve_degrees(config.parallelism, ranks)
    apart = _experts(model)
    # with one microbatch, each block's are reduced at once
    late = reduces_once(config) and config.microbatches(degrees["dp_replicate"] * degrees["dp_shard"]) > 1
    late = late and not config.parallelism.cpu_offload  # they wait on the device, and this is about the host's memory
    shards, tp, ep = degrees["dp_shard"] * degrees["cp"], degrees["tp"], config.parallelism.expert_parallel_degree
    # experts are split over all ranks of a replica, or tensor parallelism does not split them
    of_experts, held = shards * tp // ep if ep > 1 else shards, 0.0
    for name, p in model.named_parameters():
        if not share.has(name):
            continue
        size = p.numel() * p.element_size()
        if p.requires_grad:
            size += p.numel() * state_bytes(name, p, config.optimizer)
            if not late:
                size += p.numel() * p.element_size()
        if id(p) in apart:
            held += size / ep * largest_share((p.shape[0] // ep, *p.shape[1:]), of_experts)
        else:
            held += size / (shards * tp)
    kept = int(held)
    if late:  # as the reduction takes them, until the last microbatch
        kept += unsharded(config, model, share) * DTYPES[config.training.mixed_precision_reduce].itemsize
    return kept


def unsharded(config: Config, model: nn.Module, share: StageAssignment | None = None, frozen: bool = False) -> int:
    """How many trained values a rank has where FSDP2 has gathered all. model: whole, on the meta device, or parallelized.

    share: of a pipeline's rank. frozen: those that are not trained too.
    """
    apart, parallelism = _experts(model), config.parallelism
    mine = [p for name, p in model.named_parameters() if share is None or share.has(name)]
    trained = [(p.numel(), id(p) in apart) for p in mine if p.requires_grad or frozen]
    of_experts = sum(size for size, is_expert in trained if is_expert) // parallelism.expert_parallel_degree
    return of_experts + sum(size for size, is_expert in trained if not is_expert) // parallelism.tensor_parallel_degree


def _experts(model: nn.Module) -> set[int]:
    """The ids of the parameters that expert parallelism splits."""
    return {id(parameter) for experts in experts_of(model) for parameter in experts.parameters()}


def faults(config: Config, model: Decoder, ranks: int, local_ranks: int) -> Iterator[str]:
    """A GPU, or the machine's memory, that cannot hold what `local_ranks` of `ranks` ranks keep there; with what fits."""
    cuda = torch.cuda.is_available()
    on_gpu = cuda and not config.parallelism.cpu_offload
    if on_gpu:  # its size, since asking for what is free takes a context, which a start would wait for
        devices = range(torch.cuda.device_count())
        room, where = min(torch.cuda.get_device_properties(each).total_memory for each in devices), "a GPU of this machine"
    else:
        room, where = machine_memory() // local_ranks, f"this machine, for each of {local_ranks} ranks,"
    kept = kept_bytes(config, model, ranks)
    if kept > room:
        fitting = [f"{way} ({size / GIB:.1f} GiB)" for way, size in _ways(config, ranks, room, cuda) if size <= room]
        if helps(config, OFFLOAD, cuda) and kept * local_ranks <= machine_memory():
            fitting.append(f"{spelled(OFFLOAD)}, which is slower")
        yield (
            f"memory: parameters, gradients and optimizer state take {kept / GIB:.1f} GiB on each rank, and {where} has "
            f"{room / GIB:.1f} GiB; these fit: {', or '.join(fitting) or 'none of the options'}; titanlite estimate "
            "predicts what activations add"
        )


def _ways(config: Config, ranks: int, room: int, cuda: bool) -> Iterator[tuple[str, int]]:
    """Options that leave less to keep, each with the bytes that remain; of more ranks, the first number that fits `room`."""
    family = family_of(config.model)
    for keys, remedy in ways(config, 0, cuda):
        if remedy.saves != "activations":
            changed = config.with_keys(keys)
            yield spelled(keys), kept_bytes(changed, on_meta(family, changed), ranks)
    sharded, model = config.with_keys({"parallelism.data_parallel_shard_degree": -1}), on_meta(family, config)
    of_more = ((ranks * more, kept_bytes(sharded, model, ranks * more)) for more in _MORE_RANKS)
    if (enough := next((found for found in of_more if found[1] <= room), None)) is not None:
        yield f"{enough[0]} ranks with parallelism.data_parallel_shard_degree = -1", enough[1]


# That the ranks of this machine fit on it.
CHECK = Check(
    "memory",
    lambda s: faults(s.config, s.model, s.ranks, s.local_ranks) if s.local_ranks is not None else (),
    ("mesh", "sharding", "pipeline", "distillation", "parameters of the optimizer"),
)


def unverified(config: Config, ranks: int) -> Iterator[str]:
    """What a sound configuration needs, for a machine that has no GPU."""
    kept = kept_bytes(config, on_meta(family_of(config.model), config), ranks)
    yield f"memory: {kept / GIB:.1f} GiB a rank for parameters, gradients and optimizer state; titanlite estimate predicts all"
