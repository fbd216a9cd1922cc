"""Data parallelism: FSDP2 over dp_shard and cp, replicas over dp_replicate.

FSDP2 does the mixed precision too. A single process has nothing to gather or reduce: it casts parameters where they are used
(transforms/cast.py), which costs less.
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from models.decoder import Decoder
from models.further import blocks_of, further_of
from models.moe import experts_of
from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.parallel.mesh import data_degree, fsdp_mesh, reduces_once, split_dimension
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.parameters import is_tied
from titanlite.transforms.shards import local_part


def apply_fsdp(model: Decoder, config: Config, mesh: DeviceMesh, of_experts: DeviceMesh | None, root: nn.Module) -> None:
    """Applies FSDP2 to embedding, blocks, MTP modules and head. Gradients are summed: the loss is divided already.

    of_experts: the mesh that shards experts, where that is not the one of all other parameters. root: what is called, the
    model or its stage.
    """
    training, parallelism = config.training, config.parallelism
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        cast_forward_inputs=False,  # activations leave the embedding in param_dtype; RoPE's tables stay in float32
    )
    policy = parallelism.fsdp_reshard_after_forward
    kept = policy == "never" or (policy == "default" and parallelism.pipeline_parallel_degree > 1)
    of_head = policy == "always"
    pinned = mesh.device_type == "cuda"  # and not in a prediction
    offload = CPUOffloadPolicy(pin_memory=pinned) if parallelism.cpu_offload else OffloadPolicy()
    shards = fsdp_mesh(mesh)
    options: dict[str, Any] = {"mesh": shards, "mp_policy": precision, "offload_policy": offload}
    placement_fn = functools.partial(_placement, ranks=shards.shape[-1])
    if of_experts is not None and torch.equal(of_experts.mesh, shards.mesh):
        of_experts = None  # both have one rank, or no replica has more
    if of_experts is not None and not BEFORE_2_13:
        apart = {id(parameter) for experts in experts_of(model) for parameter in experts.parameters()}
        placement_fn = functools.partial(placement_fn, apart=apart, info=_mesh_info(of_experts))
    elif of_experts is not None:  # one mesh for all parameters of a unit: experts are units inside their block's
        split = functools.partial(_placement, ranks=of_experts.shape[-1])
        for experts in experts_of(model):
            fully_shard(experts, reshard_after_forward=not kept, **options | {"mesh": of_experts, "shard_placement_fn": split})
    options_of_blocks = options | {"shard_placement_fn": placement_fn}
    often = Counter(module for block in blocks_of(model) for module in block.modules())
    shared = nn.ModuleList(module for module in often if often[module] > 1)  # such as one attention of all blocks
    theirs = {*shared.parameters()} or None
    # an MTP module is a unit around that of its block
    for unit in [*blocks_of(model), *further_of(model).values()]:
        fully_shard(unit, reshard_after_forward=not kept, ignored_params=theirs, **options_of_blocks)
    embed, head = model.embed, model.head
    only_tokens = type(embed) is nn.Embedding  # which its gradient needs, and not the weight; a fork's may multiply by others
    if embed is not None and head is not None and is_tied(model):
        # one parameter belongs to one unit, gathered before the first layer and freed after the loss
        _, sharded_head = fully_shard([embed, head], reshard_after_forward=of_head, **options)
        # it stays gathered through the head's only backward pass
        if not of_head and only_tokens and not further_of(model):
            sharded_head.set_unshard_in_backward(False)
    else:
        if embed is not None:
            sharded_embed = fully_shard(embed, reshard_after_forward=not kept, **options)
            if only_tokens:
                sharded_embed.set_unshard_in_backward(False)
        if head is not None:
            fully_shard(head, reshard_after_forward=of_head, **options)
    # What blocks share belongs to the root, which finds it among its children, and so is gathered in all of a pass. As a unit
    # of its own it would have hooks inside of blocks, where the compiler stops.
    root.add_module("titanlite_shared", shared)
    # a list of a fork may have modules of blocks too, such as their routers
    taken = {p for unit in root.modules() if isinstance(unit, FSDPModule) for p in unit.parameters()} - {*shared.parameters()}
    fully_shard(root, reshard_after_forward=False, ignored_params=taken, **options_of_blocks)
    del root.titanlite_shared
    deferred = GradientSync.of(config)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            for group in torch_private.fsdp_groups(module) if deferred.shards else ():
                torch_private.accumulate_alike(group)
    model.titanlite_gradient_sync = deferred  # type: ignore[assignment]  # for `choose_reductions`
    if shards.ndim > 1 and config.microbatches(data_degree(mesh)) > 1 and deferred.replicas:
        for unit in waiting_units(model):
            for group in torch_private.fsdp_groups(unit):
                torch_private.set_reduce_scatter(group, _WholeReduceScatter(_name(unit), group))
    _gather_ahead(model, config, root)


def _gather_ahead(model: Decoder, config: Config, root: nn.Module) -> None:
    """Sets which units are gathered ahead of their use, where FSDP2's own prefetching is not enough.

    In the forward pass, FSDP2 starts a unit's all-gather when the host reaches the unit. With expert parallelism the host
    waits in each layer for the counts of its tokens, so that all-gathers would start too late.
    """
    depth, waits = config.parallelism.fsdp_prefetch, config.parallelism.expert_parallel_degree > 1
    blocks: list[list[Any]] = [
        [module for module in block.modules() if isinstance(module, FSDPModule)] for block in model.layers.values()
    ]
    # the first blocks with the root, which is called once: MTP modules call the embedding again, behind the blocks
    first: list[Any] = [model.embed] if isinstance(model.embed, FSDPModule) else []
    for index, (unit, *_) in enumerate([[root], *blocks]):
        if depth > 1 or waits:
            ahead = list(itertools.chain(*blocks[index : index + depth]))
            unit.set_modules_to_forward_prefetch(ahead if index else first + ahead)
    for index, (unit, *_) in enumerate(blocks):
        if depth > 1:
            unit.set_modules_to_backward_prefetch(list(itertools.chain(*blocks[max(0, index - depth) : index]))[::-1])


def _placement(parameter: nn.Parameter, ranks: int, apart: Collection[int] = (), info: Any = None) -> Any:
    """How a parameter is split. apart: ids of those on another mesh of their unit, which `info` describes."""
    if id(parameter) in apart:
        return torch_private.fsdp_common.ShardPlacementResult(_placement(parameter, info.shard_mesh_size), info)
    return Shard(split_dimension(local_part(parameter).shape, ranks))


def _mesh_info(mesh: DeviceMesh) -> Any:
    """FSDP2's description of a mesh of shards, or of replicas and shards."""
    if mesh.ndim == 1:
        return torch_private.fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return torch_private.fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


class GradientSync(NamedTuple):
    """Which reductions of gradients wait for the last microbatch of a step."""

    shards: bool  # the reduce-scatter over dp_shard, and with it all others
    replicas: bool  # the all-reduce over dp_replicate of what the reduce-scatters of `waiting_units` sum to

    @classmethod
    def of(cls, config: Config) -> "GradientSync":
        """FSDP2 accumulates in the precision of the reduction, which must not be narrower than that of the gradients."""
        training, shards = config.training, reduces_once(config)
        narrow = training.mixed_precision_reduce == "bfloat16" and training.dtype == "float32"
        return cls(shards, not shards and not narrow)


def choose_reductions(model: Decoder, last: bool) -> None:
    """Call before a microbatch, to choose which of its gradients are reduced. last: whether it is the last one of its step."""
    if isinstance(model, FSDPModule):
        deferred: Any = model.titanlite_gradient_sync
        model.set_requires_gradient_sync(last or not deferred.shards)
        if deferred.replicas:
            for unit in waiting_units(model):
                unit.set_requires_all_reduce(last, recurse=False)


def check_reductions(model: Decoder) -> None:
    """Call after a step's backward passes. Raises UserError if gradients of a unit still wait for those of other replicas."""
    for unit in waiting_units(model) if isinstance(model, FSDPModule) else ():
        # they would be added to those of the next step
        if any(map(torch_private.waits_for_replicas, torch_private.fsdp_groups(unit))):
            raise UserError(f"a step's last microbatch has no gradients for a {_name(unit)}, and an earlier one has. {_EVERY}")


def waiting_units(model: Decoder) -> list[Any]:
    """The FSDP2 units whose all-reduce over replicas can be deferred: those that reduce all their parameters at once.

    The unit of a tied embedding and head does not, since the two run at different times.
    """
    ends = () if is_tied(model) else (model.embed, model.head)
    experts = (each for each in experts_of(model) if isinstance(each, FSDPModule))  # 2.11: units inside their block's
    return [*blocks_of(model), *experts, *further_of(model).values(), *(unit for unit in ends if unit is not None)]


_EVERY = (
    "With replicas and accumulation, every microbatch must reach every parameter; set parallelism.reduce_every_microbatch = "
    "false, which accumulates gradients before they are reduced"
)


def _name(unit: Any) -> str:
    """The class of a unit of FSDP2, in messages."""
    return type(unit).__name__.removeprefix("FSDP")


class _WholeReduceScatter(torch_private.DefaultReduceScatter):
    """The reduce-scatter of a unit whose all-reduce is deferred. It refuses gradients of only some of the unit's parameters.

    FSDP2 adds the flat results of a step's microbatches without checking which parameters they belong to. So it would sum
    gradients of different parameters that have the same size.
    """

    def __init__(self, unit: str, group: Any) -> None:
        """unit: its name in messages. group: FSDP2's, of these parameters."""
        self.unit, self.group, self.to_send = unit, group, True

    @property
    def elements(self) -> int:
        """Of all trained parameters; a hook may have frozen some of them."""
        trained = [each for each in self.group.fsdp_params if each.sharded_param.requires_grad]
        return sum(each.padded_sharded_param_size.numel() for each in trained) * self.group.mesh_info.shard_mesh_size

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 takes a buffer for what it sends, and then one for the result."""
        if self.to_send and math.prod(size) != self.elements:
            raise UserError(
                f"a microbatch has gradients for {math.prod(size):,} of the {self.elements:,} trained values of {self.unit}. "
                + _EVERY
            )
        self.to_send = not self.to_send
        return super().allocate(size, dtype=dtype, device=device)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs the model without gradients and dropout; afterwards frees what FSDP keeps for a backward pass."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
    release(model)


def begin(model: nn.Module) -> None:
    """Call before code that may freeze parameters and train them later, which FSDP2 would reduce in another precision."""
    pipeline: Any = getattr(model, "pipeline", None)
    roots: list[nn.Module] = pipeline.stages if pipeline else [model]
    for root in roots:
        if isinstance(root, FSDPModule):
            torch_private.begin_fsdp(root)


def release(model: nn.Module) -> None:
    """Frees what FSDP2 keeps of a forward pass for a backward pass that does not come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The unit of a tied embedding and head expects another forward pass of the embedding, so it would stay gathered.
            torch_private.end_forward(module)
            module.reshard()
