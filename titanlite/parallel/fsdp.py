"""Data parallelism: FSDP2 over dp_shard, replicas over dp_replicate.

FSDP2 carries the mixed precision too. A process that is alone has nothing to gather or reduce, and casts parameters where they
are used instead (transforms/cast.py), which costs less.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.transforms.dtypes import DTYPES


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
    shards = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    options: dict[str, Any] = {"mesh": shards, "mp_policy": precision, "offload_policy": offload}
    blocks = [fully_shard(block, reshard_after_forward=of_block, **options) for block in model.layers.values()]
    embed, head = model.embed, model.head
    if embed is not None and head is not None and head.output.weight is embed.weight:
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
    if parallelism.fsdp_prefetch > 1:  # FSDP2 itself prefetches one
        depth = parallelism.fsdp_prefetch
        for place, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - depth) : place][::-1])


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
            module.reshard()
