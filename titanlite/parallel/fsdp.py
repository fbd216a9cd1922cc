"""Data parallelism: FSDP2 over dp_shard, replicas over dp_replicate.

FSDP2 carries the mixed precision too. A process that is alone has nothing to gather or reduce, and casts parameters where they
are used instead (transforms/cast.py), which costs less.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.config.schema import Config
from titanlite.parallel.mesh import fsdp_mesh
from titanlite.transforms.dtypes import DTYPES


def needs_fsdp(config: Config, ranks: int) -> str:
    """Why FSDP2 is needed: what there is to gather, to fetch, or to accumulate in another precision; "" where nothing is."""
    reasons = {
        f"there are {ranks} processes": ranks > 1,
        "parallelism.cpu_offload = true": config.parallelism.cpu_offload,
        "float8.enable_fsdp_float8_all_gather = true": config.float8.enable_fsdp_float8_all_gather,
        "parallelism.reduce_every_microbatch = false": not config.parallelism.reduce_every_microbatch,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def apply_fsdp(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """FSDP2 on embedding, each block and head; gradients are summed, not averaged, since the loss is divided already."""
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
    options = {"mesh": fsdp_mesh(mesh), "mp_policy": precision, "offload_policy": offload}
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=of_block, **options)
    tied = model.head is not None and model.embed is not None and model.head.output.weight is model.embed.weight
    if tied:  # one parameter must be in one unit; it is gathered before the first layer and freed after the loss
        fully_shard([model.embed, model.head], reshard_after_forward=of_head, **options)
        if of_head is False:  # it is there until the head's backward pass is over, and nothing later reads it
            model.head.set_unshard_in_backward(False)
    else:
        if model.embed is not None:
            fully_shard(model.embed, reshard_after_forward=of_block, **options)
            if isinstance(model.embed, nn.Embedding):  # its gradient needs the tokens, not the weight
                model.embed.set_unshard_in_backward(False)
        if model.head is not None:
            fully_shard(model.head, reshard_after_forward=of_head, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    if parallelism.fsdp_prefetch > 1:  # one ahead is FSDP2's own way
        prefetch(list(model.layers.values()), parallelism.fsdp_prefetch)


def prefetch(blocks: list[nn.Module], depth: int) -> None:
    """Has each block gather the parameters of the `depth` blocks that are used after it, in either direction."""
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - depth) : place][::-1])


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without gradients and dropout, and what FSDP keeps for a backward pass given back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
    for module in model.modules():  # what is kept for a backward pass that does not come
        if isinstance(module, FSDPModule):
            module.reshard()
