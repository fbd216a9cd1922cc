"""Data parallelism: FSDP2 over dp_shard and cp, replicas over dp_replicate.

FSDP2 carries the mixed precision too. A process that is alone has nothing to gather or reduce, and casts parameters where they
are used instead (transforms/cast.py), which costs less.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import Shard

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.parallel.mesh import data_degree, fsdp_mesh
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.shards import local_part


def apply_fsdp(model: Decoder, config: Config, mesh: DeviceMesh) -> None:
    """Applies FSDP2 to embedding, each block and head. Gradients are summed, not averaged: the loss is divided already."""
    training, parallelism = config.training, config.parallelism
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        cast_forward_inputs=False,  # activations leave the embedding in param_dtype; RoPE's tables stay in float32
    )
    policy = parallelism.fsdp_reshard_after_forward
    of_block = policy if isinstance(policy, int) else policy != "never"
    of_head = False if policy == "default" else of_block
    offload = CPUOffloadPolicy() if parallelism.cpu_offload else OffloadPolicy()
    shards = fsdp_mesh(mesh)
    options: dict[str, Any] = {"mesh": shards, "mp_policy": precision, "offload_policy": offload}
    ranks = shards.size(-1)
    # what FSDP2 reshards over fewer ranks it splits along the first dimension
    dimension = functools.partial(split_dimension, ranks=1 if isinstance(policy, int) else ranks)
    whole = {unit: _WholeReduceScatter(unit, ranks, dimension) for unit in waiting_units(model)}
    options_of_blocks = options | {"shard_placement_fn": lambda parameter: Shard(dimension(parameter.shape))}
    blocks = [fully_shard(block, reshard_after_forward=of_block, **options_of_blocks) for block in model.layers.values()]
    embed, head = model.embed, model.head
    if embed is not None and head is not None and _tied(model):
        # one parameter belongs to one unit, gathered before the first layer and freed after the loss
        _, sharded_head = fully_shard([embed, head], reshard_after_forward=of_head, **options)
        if of_head is False:  # it stays gathered through the head's backward pass, and nothing later reads it
            sharded_head.set_unshard_in_backward(False)
    else:
        if embed is not None:
            sharded_embed = fully_shard(embed, reshard_after_forward=of_block, **options)
            if isinstance(embed, nn.Embedding):  # its gradient needs the tokens, not the weight
                sharded_embed.set_unshard_in_backward(False)
        if head is not None:
            fully_shard(head, reshard_after_forward=of_head, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    if shards.ndim > 1 and config.microbatches(data_degree(mesh)) > 1 and Deferred.of(config).replicas:
        for unit, reduce_scatter in whole.items():
            unit.set_custom_reduce_scatter(reduce_scatter)
    if parallelism.fsdp_prefetch > 1:  # FSDP2 itself prefetches one
        depth = parallelism.fsdp_prefetch
        for place, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - depth) : place][::-1])


def split_dimension(shape: Sequence[int], ranks: int) -> int:
    """Which dimension of a parameter FSDP2 splits: the first, but for stacks of experts whose number the ranks do not divide.

    Of 8 experts on 64 ranks, 56 would hold nothing. Only the first dimension may be split unevenly.
    """
    return 1 if len(shape) == 3 and shape[0] % ranks and shape[1] % ranks == 0 else 0


class Deferred(NamedTuple):
    """Which reductions of gradients wait for the last microbatch of a step."""

    shards: bool = False  # the reduce-scatter over dp_shard, and with it all others
    replicas: bool = True  # the all-reduce over dp_replicate of what the reduce-scatters of `waiting_units` add up to

    @classmethod
    def of(cls, config: Config) -> "Deferred":
        """FSDP2 adds up what waits in the precision of the reduction, which must not be narrower than that of the gradients."""
        training, shards = config.training, not config.parallelism.reduce_every_microbatch
        narrow = training.mixed_precision_reduce == "bfloat16" and training.dtype == "float32"
        return cls(shards, not shards and not narrow)


DEFERRED = Deferred()  # where a float32 gradient is reduced in float32


def choose_reductions(model: Decoder, deferred: Deferred, last: bool) -> None:
    """Before a microbatch: its gradients are reduced as `deferred` says. last: whether it is the last one of its step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not deferred.shards)
        if deferred.replicas:
            for unit in waiting_units(model):
                unit.set_requires_all_reduce(last, recurse=False)


def waiting_units(model: Decoder) -> list[Any]:
    """The units of FSDP2 whose all-reduce over replicas can wait: those that reduce all their parameters at once.

    The unit of a tied embedding and head does not, since the two run at different times.
    """
    ends = () if _tied(model) else (model.embed, model.head)
    return [*model.layers.values(), *(unit for unit in ends if unit is not None)]


class _WholeReduceScatter(DefaultReduceScatter):
    """The reduce-scatter of a unit whose all-reduce waits; refuses gradients of only some of its parameters.

    FSDP2 adds the flat results of a step's microbatches without knowing whose values they are. Results of equal size from
    different parameters would be added to each other.
    """

    def __init__(self, unit: nn.Module, ranks: int, dimension: Callable[[Sequence[int]], int]) -> None:
        """unit: not yet sharded over dp_shard, which has so many ranks. dimension: which one of a shape they split."""
        self.unit = type(unit).__name__
        shapes = [local_part(parameter).shape for parameter in unit.parameters() if parameter.requires_grad]
        # FSDP2 pads the first dimension, and splits another one only evenly
        self.elements = sum(
            math.prod(shape) if dimension(shape) else -(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes
        )
        self.to_send = True

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 takes a buffer for what it sends, and then one for the result."""
        if self.to_send and math.prod(size) != self.elements:
            raise UserError(
                f"a microbatch has gradients for {math.prod(size):,} of the {self.elements:,} trained values of {self.unit}. "
                "With replicas and accumulation, every microbatch must reach every parameter; set "
                "parallelism.reduce_every_microbatch = false, which adds up gradients before they are reduced"
            )
        self.to_send = not self.to_send
        return super().allocate(size, dtype=dtype, device=device)


def _tied(model: Decoder) -> bool:
    return model.embed is not None and model.head is not None and model.head.output.weight is model.embed.weight


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
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The unit of tied embedding and head has run the head last, waits for the embedding, and would stay gathered.
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._training_state = TrainingState.IDLE
            module.reshard()
