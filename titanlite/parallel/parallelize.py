"""The order in which a model is changed before it has memory: one list, and why the order matters."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.expert import apply_expert_parallel
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.mesh import needs_fsdp
from titanlite.parallel.pipeline import Pipeline, cut, flow_of, shares
from titanlite.parallel.tensor import apply_tensor_parallel, overlap_tensor_parallel
from titanlite.registry.family import Family
from titanlite.transforms import activation_checkpoint as recompute
from titanlite.transforms import float8
from titanlite.transforms.attention_kernels import choose_attention
from titanlite.transforms.cast import cast_where_used
from titanlite.transforms.compile import compile_model
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.offload import Offload


def parallelize(
    family: Family, config: Config, mesh: DeviceMesh, device: torch.device, layers: Sequence[str] | None = None
) -> Decoder:
    """A run's model on the meta device, changed for training on `mesh`; `transforms.initialize` gives it memory and weights.

    device: of the kernels. layers: the names of the blocks to keep; predictions measure a few. None: all. Raises UserError as
    each step does.
    """
    cfg = config.activation_checkpoint
    # Adapters come first: what splits, casts, saves or initialises parameters then finds theirs like any other.
    model = on_meta(family, config)
    # Other classes of linear layers, before tensor parallelism hangs its hooks on them.
    float8.convert(model, config)
    choose_attention(model, config, device)
    if config.training.z_loss and model.head is not None:
        model.head.z_loss = config.training.z_loss
    apply_context_parallel(model, config, mesh["cp"])
    # FSDP2 shards what tensor and expert parallelism have left to a rank, so that these come before it.
    experts = apply_expert_parallel(model, config, mesh)
    apply_tensor_parallel(model, family, mesh["tp"])
    # Casts come before recomputation and the compiler: they are then done again, or are parts of other kernels.
    sharded = needs_fsdp(config, mesh.size())
    if not sharded:
        apart = recompute.feed_forward(model) if cfg.sequence_chunks > 1 else ()
        cast_where_used(model, DTYPES[config.training.mixed_precision_param], again=cfg.mode == "none", apart=apart)
    # The compiler must see which operations are kept, so that selection goes inside of what it compiles.
    option = {"full": 1, "selective": cfg.selective_ac_option}.get(cfg.mode)  # "op", every how many blocks, or None
    if option == "op":
        rank = config.lora.rank if config.lora.enable else None
        recompute.checkpoint_operations(model, getattr(family.module, "KEEP", ()), rank)
    if cfg.sequence_chunks > 1:
        recompute.chunk_feed_forward(model, cfg.sequence_chunks)
    recompute.set_memory_budget(cfg)  # also where only FlexAttention is compiled
    if config.compile.enable:
        overlap_tensor_parallel(config.parallelism.enable_async_tensor_parallel, mesh["tp"])
        compile_model(model, config.compile)
    # A DeviceMesh among the saved tensors of a compiled block fails, so whole blocks are checkpointed around it.
    if isinstance(option, int):
        recompute.checkpoint_blocks(model, option, Offload(device) if cfg.offload and device.type == "cuda" else None)
    # Not earlier: what came before depends on the numbers of layers, and patterns can name one.
    for name in set(model.layers).difference(layers) if layers is not None else ():
        del model.layers[name]
    # As late, since tables name all of a model.
    pp, stages = mesh["pp"], []
    if pp.size() > 1:
        share = shares(config, family, model)[pp.get_local_rank()]
        stages = cut(model, share, flow_of(config, family, mesh["tp"]))
    # FSDP2 must see the parameters as the layers will use them, and its hooks stay outside of the graphs.
    of_experts = experts.fsdp if experts else None
    for stage in stages:
        apply_fsdp(stage.part, config, mesh, of_experts, root=stage)
    model.pipeline = Pipeline(stages, model, config, mesh, device) if stages else None
    if sharded and not stages:
        apply_fsdp(model, config, mesh, of_experts)
    return model
