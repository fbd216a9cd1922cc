"""What the backward pass computes again in place of keeping it (Chen et al., "Training deep nets with sublinear memory
cost", arXiv:1604.06174).

Two kinds, on two sides of torch.compile: the selection of single operations must be seen by the compiler, so it goes inside;
a whole block is checkpointed around its compiled form, since a DeviceMesh among the saved tensors of a compiled block fails.
parallel/parallelize.py keeps that order.
"""

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch._functorch import config as partitioner
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.schema import ActivationCheckpoint

_aten, _c10d, _higher = torch.ops.aten, torch.ops._c10d_functional, torch.ops.higher_order

# Dear to compute again, so kept: attention in all its kernels, and the sums over the network. Gathers are done again: what
# they bring is as large as the whole sequence on every rank (405b with tp 8: 2 GiB a layer). A model's module may list more
# under KEEP.
KEPT_OPERATIONS = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_attention_math.default,
    _higher.flex_attention,  # inside a compiled block
    _higher.inductor_compiled_code,  # the same by itself: models/attention.py compiles nothing else that a block calls
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_reduce.default,
)
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.linear.default)


def checkpoint_operations(model: nn.Module, kept: tuple[Any, ...], rank: int | None = None) -> None:
    """In each block keeps the results of `kept` operations and of every second matrix product; call it before compiling.

    rank: of adapters, whose products are cheap and computed again.
    """
    for block in model.layers.values():
        block.__class__ = _checkpointed_class(type(block), (*KEPT_OPERATIONS, *kept), rank)


def checkpoint_blocks(model: nn.Module, every: int) -> None:
    """Of every n-th block keeps the input alone, beginning with the n-th; call it after compiling."""
    for number, block in enumerate(model.layers.values(), 1):
        if number % every == 0:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def set_memory_budget(keys: ActivationCheckpoint) -> None:
    """Tells the compiler's partitioner, which knows one budget a process, what share of the activations to keep."""
    partitioner.activation_memory_budget = keys.memory_budget if keys.mode == "memory_budget" else 1.0
    # Under tensor parallelism a graph's inputs include the DeviceMesh, which PyTorch 2.13 will not weigh by itself. It holds
    # no activations; 2.11 has no such setting and needs none.
    if hasattr(partitioner, "unsafe_treat_script_objects_as_zero_size"):
        partitioner.unsafe_treat_script_objects_as_zero_size = True


@functools.cache
def _checkpointed_class(block: type[nn.Module], kept: tuple[Any, ...], rank: int | None) -> type[nn.Module]:
    """The class of blocks whose forward is checkpointed by operation; one class for all, so that one compilation serves all."""

    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(_policy(kept, rank))

    def forward(self: nn.Module, *args: Any) -> Any:
        return checkpoint(block.forward, self, *args, use_reentrant=False, context_fn=contexts)

    return type(f"Checkpointed{block.__name__}", (block,), {"forward": forward})


def _policy(kept: tuple[Any, ...], rank: int | None) -> Any:
    """What to do with each operation of one forward pass; matrix products are counted, apart for the recomputation.

    Those with a matrix of `rank` rows or columns are adapters': not counted, and not kept.
    """
    products: Counter[bool] = Counter()

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in kept:
            return CheckpointPolicy.MUST_SAVE
        if operation in _MATRIX_PRODUCTS and rank not in args[1].shape:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide
