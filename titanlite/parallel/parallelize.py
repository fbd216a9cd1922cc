"""The order in which a model is changed before it has memory: one list of steps, and why the order matters.

A step has a check, which lists the faults of a configuration, and a change of the model. `titanlite.loop.checks` runs the
checks of all steps before any process starts, so that no change repeats them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.parallel import context, expert, pipeline, tensor
from titanlite.parallel.mesh import needs_fsdp, resolve_degrees
from titanlite.registry import own
from titanlite.registry.check import Faults, Subject, of_module
from titanlite.registry.family import Family
from titanlite.transforms import activation_checkpoint as recompute
from titanlite.transforms import attention_kernels, compile, float8
from titanlite.transforms.cast import cast_where_used
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.offload import Offload


@dataclass
class Build:
    """What the steps read of a run, and what a step passes to a later one."""

    family: Family
    config: Config
    mesh: DeviceMesh
    device: torch.device  # of the kernels
    layers: Sequence[str] | None  # the names of the blocks to keep; None: all
    of_experts: DeviceMesh | None = None  # the mesh that shards experts, where they are split
    stages: Sequence[pipeline.Stage] = ()
    tied: bool = False  # of a model in stages: whether the first and the last share a parameter

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 casts and shards; else the process is alone."""
        return needs_fsdp(self.config, self.mesh.size())

    @property
    def recomputed(self) -> int | str | None:
        """What the backward pass recomputes: "op", every how many blocks, or None."""
        cfg = self.config.activation_checkpoint
        return {"full": 1, "selective": cfg.selective_ac_option}.get(cfg.mode)


class Step(NamedTuple):
    """One change of a model on the meta device."""

    name: str
    apply: Callable[[Decoder, Build], None]
    faults: Faults = lambda _: ()
    needs: tuple[str, ...] = ()  # checks that must have passed, as in `Check`


def _loss(model: Decoder, build: Build) -> None:
    cfg = build.config.training
    if model.head is None:  # of another stage
        return
    if cfg.z_loss:
        model.head.z_loss = cfg.z_loss
    if (loss := own.token_loss(build.config)) is not None:
        model.head.loss = loss


def _split_experts(model: Decoder, build: Build) -> None:
    build.of_experts = expert.apply_expert_parallel(model, build.config, build.mesh)


def _cast(model: Decoder, build: Build) -> None:
    if build.sharded:  # FSDP2 casts
        return
    cfg = build.config.activation_checkpoint
    apart = recompute.feed_forward(model) if cfg.sequence_chunks > 1 else ()
    cast_where_used(model, DTYPES[build.config.training.mixed_precision_param], again=cfg.mode == "none", apart=apart)


def _checkpoint_operations(model: Decoder, build: Build) -> None:
    cfg = build.config
    if build.recomputed == "op":
        kept, rank = getattr(build.family.module, "KEEP", ()), cfg.lora.rank if cfg.lora.enable else None
        recompute.checkpoint_operations(model, kept, rank)
    recompute.set_memory_budget(cfg)  # also where only FlexAttention is compiled


def _chunk_feed_forward(model: Decoder, build: Build) -> None:
    if (chunks := build.config.activation_checkpoint.sequence_chunks) > 1:
        recompute.chunk_feed_forward(model, chunks)


def _compile(model: Decoder, build: Build) -> None:
    if build.config.compile.enable:
        tensor.overlap_tensor_parallel(build.config.parallelism.enable_async_tensor_parallel, build.mesh["tp"])
        compile.compile_model(model, build.config.compile)


def _checkpoint_blocks(model: Decoder, build: Build) -> None:
    if isinstance(every := build.recomputed, int) and not recompute.compiler_recomputes(build.config):
        offload = build.config.activation_checkpoint.offload and build.device.type == "cuda"
        recompute.checkpoint_blocks(model, every, Offload(build.device) if offload else None)


def _drop_layers(model: Decoder, build: Build) -> None:
    for name in set(model.layers).difference(build.layers) if build.layers is not None else ():
        del model.layers[name]


def _cut_into_stages(model: Decoder, build: Build) -> None:
    pp = build.mesh["pp"]
    if pp.size() > 1:
        share = pipeline.assign_stages(build.config, build.family, model)[pp.get_local_rank()]
        build.tied = share.tied
        build.stages = pipeline.take_stages(model, share, pipeline.flow_of(build.config, build.family, build.mesh["tp"]))


def _fsdp(model: Decoder, build: Build) -> None:
    from titanlite.parallel.fsdp import apply_fsdp  # not at the top: a check need not import PyTorch's

    roots: Iterable[tuple[Decoder, nn.Module]] = [(stage.part, stage) for stage in build.stages] or [(model, model)]
    for part, root in roots if build.sharded else ():
        apply_fsdp(part, build.config, build.mesh, build.of_experts, root)
    if build.stages:
        model.pipeline = pipeline.Pipeline([*build.stages], model, build.config, build.mesh, build.device, build.tied)


def _shard_faults(s: Subject) -> Iterable[str]:
    degrees = resolve_degrees(s.config.parallelism, s.ranks)
    return float8.shard_faults(s.config, s.model, degrees["dp_shard"] * degrees["cp"])


STEPS = (
    # Other classes of linear layers, before tensor parallelism hangs its hooks on them.
    Step("float8", lambda model, build: float8.convert(model, build.config), lambda s: float8.faults(s.config)),
    Step(
        "attention",
        lambda model, build: attention_kernels.choose_attention(model, build.config, build.device),
        lambda s: attention_kernels.faults(s.config, s.family, s.model),
        ("model",),
    ),
    Step("head", _loss),
    Step(
        "context",
        lambda model, build: context.apply_context_parallel(model, build.config, build.mesh["cp"]),
        lambda s: context.faults(s.config, s.model),
        ("model", "limits"),
    ),
    # FSDP2 shards what tensor and expert parallelism have left to a rank, so that these come before it.
    Step("experts", _split_experts, lambda s: expert.faults(s.config, s.model), ("model",)),
    Step(
        "sharding",
        lambda model, build: tensor.apply_tensor_parallel(model, build.family, build.mesh["tp"]),
        of_module(lambda s: tensor.faults(s.config, s.family, s.model)),
        ("model",),
    ),
    # Casts come before recomputation and the compiler, which recompute them or fuse them into other kernels.
    Step("casts", _cast),
    # The compiler must see which operations are kept, so that selection goes inside of what it compiles.
    Step("activation checkpointing", _checkpoint_operations, lambda s: recompute.faults(s.config)),
    Step("chunks", _chunk_feed_forward, lambda s: recompute.model_faults(s.config, s.model), ("model",)),
    Step("compile", _compile, lambda s: compile.faults(s.config)),
    # A DeviceMesh among the saved tensors of a compiled block fails, so whole blocks are checkpointed around it.
    Step("checkpointed blocks", _checkpoint_blocks),
    # Not earlier: steps before this one count layers, and patterns can name one.
    Step("fewer layers", _drop_layers),
    # As late, because the tables cover the whole model.
    Step("pipeline", _cut_into_stages, lambda s: pipeline.faults(s.config, s.family, s.model), ("model", "flops", "limits")),
    # FSDP2 must see the parameters as the layers will use them, and its hooks stay outside of the graphs.
    Step("FSDP2", _fsdp, _shard_faults, ("model", "mesh", "sharding")),
)


def parallelize(
    family: Family, config: Config, mesh: DeviceMesh, device: torch.device, layers: Sequence[str] | None = None
) -> Decoder:
    """A run's model on the meta device, changed for training on `mesh`; `transforms.initialize` gives it memory and weights.

    device: of the kernels. layers: the names of the blocks to keep; predictions measure a few. None: all. The checks of
    `STEPS` have passed.
    """
    # Adapters come first: later steps split, cast, save and initialize their parameters like any other.
    model, build = on_meta(family, config), Build(family, config, mesh, device, layers)
    for step in STEPS:
        step.apply(model, build)
    return model
