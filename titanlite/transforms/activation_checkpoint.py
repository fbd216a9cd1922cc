"""Activation checkpointing: what the backward pass recomputes instead of keeping (Chen et al., "Training deep nets with
sublinear memory cost", arXiv:1604.06174).

There are three kinds. The compiler must see which single operations are kept, so that this selection is inside the compiled
block, and so are the parts of a feed-forward layer. Inductor recomputes whole blocks where it can (`compiler_recomputes`).
Elsewhere they are checkpointed around their compiled form: a DeviceMesh among the saved tensors of a compiled block fails.
parallel/parallelize.py keeps that order.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.blocks import SwiGLU
from models.decoder import Decoder
from models.further import blocks_of
from models.moe import CHOICES, KEEP
from models.once import passes
from titanlite.config.conflicts import Conflict, conflicts
from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.transforms.offload import Offload

_aten, _higher = torch.ops.aten, torch.ops.higher_order

# Expensive, so kept: attention in all its kernels, MoE layers, and sums over ranks. All-gathers are repeated: each result is as
# large as the whole sequence on every rank (405b with tp 8: 2 GiB a layer). A model's module can list more under KEEP.
KEPT_OPERATIONS = (
    torch_private.flash_attention.default,
    torch_private.efficient_attention.default,
    torch_private.cudnn_attention.default,
    torch_private.cpu_attention.default,
    torch_private.math_attention.default,
    _higher.flex_attention,  # inside a compiled block
    _higher.inductor_compiled_code,  # the same outside of one: models/attention.py compiles nothing else that a block calls
    torch_private.collectives.reduce_scatter_tensor.default,
    torch_private.collectives.all_reduce.default,
    *KEEP,
)
# The second one has a bias; the last one is the router's on CUDA.
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.linear.default, _aten.mm.dtype)


def checkpoint_operations(model: Decoder, kept: tuple[Any, ...], rank: int | None = None) -> None:
    """Keeps in each block the results of `kept` operations and of every second matmul; call it before compiling.

    rank: of adapters; their matmuls are cheap and recomputed.
    """
    for block in blocks_of(model):
        kind: Any = type(block)
        block.__class__ = _checkpointed_class(kind, (*KEPT_OPERATIONS, *kept), rank)


def checkpoint_blocks(model: Decoder, every: int, offload: Offload | None = None) -> None:
    """Keeps only the input of every n-th block, beginning with the n-th, and what it computes `once`; call it after compiling.

    offload: of these inputs.
    """
    for number, block in enumerate(blocks_of(model), 1):
        if number % every == 0:
            again: Any = functools.partial(checkpoint, use_reentrant=False, context_fn=passes)
            block.forward = functools.partial(again, block.forward) if offload is None else offload.around(block.forward, again)


def feed_forward(model: Decoder) -> list[nn.Module]:
    """The layers that `chunk_feed_forward` changes."""
    return [module for module in nn.ModuleList(blocks_of(model)).modules() if isinstance(module, SwiGLU)]  # each once


def unchunkable(model: Decoder) -> str:
    """Why a model's feed-forward layers cannot compute the sequence in parts; "" if they can.

    A class made from SwiGLU that mixes tokens is not found here; it differs in `titanlite check-model`.
    """
    kinds = {type(module) for module in feed_forward(model)}
    if not kinds:
        return "the model's blocks have no SwiGLU of models/blocks.py, nor a class made from it"
    more = sorted(kind.__name__ for kind in kinds if len(inspect.signature(kind.forward).parameters) != len(("self", "x")))
    return f"forward of {' and '.join(more)} takes more than x, of which the parts are made" if more else ""


def chunk_feed_forward(model: Decoder, chunks: int) -> None:
    """Feed-forward layers compute the sequence in parts, of which one is recomputed at a time; call it before compiling.

    A block that is recomputed as a whole holds at its peak what its feed-forward layer keeps for the backward pass, several
    tensors of (batch, seq, hidden). Tokens do not mix there, so it can do with those of one part (ALST, arXiv:2506.13996).
    """
    for module in feed_forward(model):
        kind: Any = type(module)
        module.__class__ = _chunked_class(kind, chunks)


# A backend that partitions as inductor does and compiles nothing, for predictions: plan/fused.py.
PARTITIONED = "titanlite_partitioned"


def compiler_recomputes(config: Config) -> bool:
    """Whether "full" is left to inductor, which recomputes only what gradients need: not a block's last matmul and all-to-all.

    Inductor keeps the results of all collectives, so that with tensor and context parallelism each block would keep the
    gathered sequence. With sequence_chunks or offload, checkpoints around compiled blocks do it.
    """
    cfg, parallel, compiler = config.activation_checkpoint, config.parallelism, config.compile
    compiled = compiler.enable and "model" in compiler.components and compiler.backend in ("inductor", PARTITIONED)
    split = parallel.tensor_parallel_degree * parallel.context_parallel_degree > 1
    return cfg.mode == "full" and compiled and not (split or cfg.offload or cfg.sequence_chunks > 1)


def set_memory_budget(config: Config) -> None:
    """Sets the share of activations that the compiler's partitioner keeps; it has one budget a process."""
    cfg = config.activation_checkpoint
    share = cfg.memory_budget if cfg.mode == "memory_budget" else 0.0 if compiler_recomputes(config) else 1.0
    torch_private.set_memory_budget(share, CHOICES)


@functools.cache
def _checkpointed_class(block: type[nn.Module], kept: tuple[Any, ...], rank: int | None) -> type[nn.Module]:
    """The class of blocks that are checkpointed by operation. All blocks share it, so that they compile once."""

    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(_policy(kept, rank))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(block.forward, self, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return type(f"Checkpointed{block.__name__}", (block,), {"forward": forward})


@functools.cache
def _chunked_class(kind: type[nn.Module], chunks: int) -> type[nn.Module]:
    """The class of feed-forward layers that compute in parts; all layers share it."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:  # (batch, seq, dim), or (tokens, dim) as in MoE layers
        parts = x.tensor_split(min(chunks, x.shape[-2]), dim=-2)  # unlike `chunk` never fewer; a text being generated is short
        return torch.cat([checkpoint(kind.forward, self, part, use_reentrant=False) for part in parts], dim=-2)

    return type(f"Chunked{kind.__name__}", (kind,), {"forward": forward})


def _policy(kept: tuple[Any, ...], rank: int | None) -> Any:
    """The policy of one forward pass. It counts matmuls, separately in the recomputation.

    Matmuls with a matrix of `rank` rows or columns are adapters': neither counted nor kept.
    """
    matmuls: Counter[bool] = Counter()

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in kept:
            return CheckpointPolicy.MUST_SAVE
        if operation in _MATMULS and rank not in args[1].shape:
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def model_faults(config: Config, model: Decoder) -> Iterator[str]:
    """A selective_ac_option above the number of blocks; feed-forward layers that cannot compute in parts; dropout that the
    compiler would recompute with other random numbers."""
    cfg, backend = config.activation_checkpoint, config.compile.backend
    every = cfg.selective_ac_option
    if cfg.sequence_chunks > 1 and (reason := unchunkable(model)):
        yield f"activation_checkpoint.sequence_chunks = {cfg.sequence_chunks}: {reason}; set it to 1"
    if cfg.mode == "selective" and isinstance(every, int) and every > len(model.layers):
        yield f"activation_checkpoint.selective_ac_option = {every}: the model has {len(model.layers)} blocks; lower it"
    draws = any(isinstance(module, torch_private.AnyDropout) for module in model.layers.modules())
    if (cfg.mode == "memory_budget" or compiler_recomputes(config)) and backend != "inductor" and draws:
        # gradients were off by 87% at a budget of 0.05, with no sign in the loss; for inductor, set_memory_budget keeps seeds
        yield (
            f'activation_checkpoint.mode = "{cfg.mode}": compile.backend = "{backend}" would recompute dropout in blocks '
            'with other random numbers; use "inductor"'
        )


CONFLICTS: tuple[Conflict, ...] = (
    ("activation_checkpoint.sequence_chunks > 1", "parallelism.tensor_parallel_degree > 1", "use context parallelism instead"),
)


def faults(config: Config) -> Iterator[str]:
    """A memory budget without the compiler; parts of a sequence that tensor parallelism splits too, or more than its tokens."""
    yield from conflicts(config, CONFLICTS)
    chunks, ranks = config.activation_checkpoint.sequence_chunks, config.parallelism.context_parallel_degree
    if chunks > (tokens := config.training.seq_len // ranks):
        shared = f" / context_parallel_degree = {config.training.seq_len} / {ranks}" if ranks > 1 else ""
        yield (
            f"activation_checkpoint.sequence_chunks = {chunks}: a rank has training.seq_len{shared} = {tokens} tokens of a "
            "sequence, so there cannot be more parts; lower it"
        )
    compiled = config.compile.enable and "model" in config.compile.components and config.compile.backend != "eager"
    if config.activation_checkpoint.mode == "memory_budget" and not compiled:
        needs = 'compile.enable = true, "model" among compile.components, and a compile.backend other than "eager"'
        yield f'activation_checkpoint.mode = "memory_budget": the compiler chooses what to keep; it needs {needs}'
