"""A model on the meta device -> the same model split over a mesh.

The order: tensor parallel, per-operation checkpointing, compile of each block, checkpointing around the compiled block, and
last FSDP2, which must see the parameters as the layers will use them. FSDP2 carries the mixed precision too; a process that
is alone has nothing to gather or reduce, and casts parameters where they are used instead, which costs less. The model's
`sharding` table says which module is split how; this file says what the names mean.

Between modules flow plain local tensors: (batch, seq / tp, dim) on the residual path, (batch, seq, heads / tp, ...) inside
attention. Splitting the sequence outside of the matrices is sequence parallelism (Korthikanti et al., arXiv:2205.05198).
All redistributions are synchronous: an AsyncCollectiveTensor that enters a compiled block loses its gradient.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from models.head import Head
from titanlite import float8
from titanlite.activation_checkpoint import checkpoint_blocks, checkpoint_operations, set_memory_budget
from titanlite.compilation import compile_model
from titanlite.config import Config
from titanlite.dtypes import DTYPES
from titanlite.errors import UserError
from titanlite.mesh import fsdp_mesh
from titanlite.zoo import Family, every_layer, match_table, tie

_SEQUENCE = 1  # the dimension of (batch, seq, ...) that sequence parallelism splits


class Style(NamedTuple):
    """What one name of a sharding table means."""

    weight: Placement  # of parameters with two dimensions, on the tp mesh
    bias: Placement  # of parameters with one
    before: Callable[[str, Tensor, DeviceMesh], Tensor] | None = None  # (module's name, its first argument, tp mesh)
    after: Callable[[Tensor, DeviceMesh], Tensor] | None = None  # (its output, tp mesh)


def _expect_gathered(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    if not isinstance(x, DTensor):
        raise UserError(f"sharding: {name} is 'column' and must read what a 'sequence' module returns, the whole sequence")
    return x


def _wrap_features(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    if isinstance(x, DTensor):
        raise UserError(f"sharding: {name} is 'row' and must read what 'column' modules return, this rank's features")
    return DTensor.from_local(x, tp, [Shard(-1)], run_check=False)


def _wrap_tokens(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    return DTensor.from_local(x, tp, [Replicate()], run_check=False)


def _unwrap(x: Tensor, tp: DeviceMesh) -> Tensor:
    return x.to_local()


def _scatter_sequence(x: Tensor, tp: DeviceMesh) -> Tensor:
    return x.redistribute(tp, [Shard(_SEQUENCE)]).to_local()


def _scatter_embedded(x: Tensor, tp: DeviceMesh) -> Tensor:
    # FSDP hangs its backward hook on what its module returns, and warns of views, which an in-place operation would unhook
    return _scatter_sequence(x, tp).clone()


def _gather_sequence(x: Tensor, tp: DeviceMesh) -> Tensor:
    return DTensor.from_local(x, tp, [Shard(_SEQUENCE)], run_check=False).redistribute(tp, [Replicate()])


STYLES: dict[str, Style] = {
    # Linear, output features split; reads the whole sequence, returns this rank's features
    "column": Style(Shard(0), Shard(0), before=_expect_gathered, after=_unwrap),
    # Linear, input features split; reads this rank's features, sums over ranks, returns this rank's slice of the sequence
    "row": Style(Shard(1), Replicate(), before=_wrap_features, after=_scatter_sequence),
    # Embedding or output projection, vocabulary split, evenly or not
    "vocab": Style(Shard(0), Shard(0)),
    # works on this rank's slice of the sequence with whole weights, and returns the gathered sequence
    "sequence": Style(Replicate(), Replicate(), after=_gather_sequence),
    # whole weights applied to whatever comes (this rank's heads, or its slice of the sequence); gradients are summed over ranks
    "replicate": Style(Replicate(), Replicate()),
    # weights of features, split as the features that a "column" module returns; what is between the ranks is the module's own
    "features": Style(Shard(0), Shard(0)),
}
_EMBEDDING = Style(Shard(0), Shard(0), before=_wrap_tokens, after=_scatter_embedded)

_STYLE_OF = {"column": (nn.Linear,), "row": (nn.Linear,), "vocab": (nn.Linear, nn.Embedding)}  # the modules a style is for


def parallelize(model: nn.Module, family: Family, config: Config, mesh: DeviceMesh) -> nn.Module:
    """Splits a meta-device model in place: tensor parallel where the mesh has it, what recomputes and compiles, FSDP2.

    Raises UserError as `sharding_faults` says.
    """
    keys = config.activation_checkpoint
    float8.convert(model, config)
    if faults := sharding_faults(model, family, mesh["tp"].size()):
        raise UserError("\n".join(faults))
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, family, mesh["tp"])
    fsdp = needs_fsdp(config, mesh.size())
    if not fsdp:
        cast_where_used(model, DTYPES[config.training.mixed_precision_param], again=keys.mode == "none")
    if keys.mode == "selective" and keys.selective_ac_option == "op":
        checkpoint_operations(model, getattr(family.module, "KEEP", ()), config.lora.rank if config.lora.enable else None)
    if config.compile.enable:
        set_memory_budget(keys)
        overlap_tensor_parallel(config.parallelism.enable_async_tensor_parallel, mesh["tp"])
        compile_model(model, config.compile)
    if keys.mode == "full":
        checkpoint_blocks(model, every=1)
    elif keys.mode == "selective" and keys.selective_ac_option != "op":
        checkpoint_blocks(model, keys.selective_ac_option)
    if fsdp:
        apply_fsdp(model, config, mesh)
    return model


def sharding_faults(model: nn.Module, family: Family, tp: int) -> list[str]:
    """What is wrong with a family's sharding table: parameters without a style, unknown styles, sizes tp does not divide."""
    styles, faults = styles_of(model, family)
    for name, style in styles.items():
        if style not in STYLES:
            faults.append(f"sharding: {every_layer(name)} has the unknown style {style!r}; there are: {', '.join(STYLES)}")
            continue
        module = model.get_submodule(name)
        kinds = _STYLE_OF.get(style)
        if kinds and not isinstance(module, kinds):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            faults.append(
                f"sharding: {every_layer(name)} is {style!r}, which is for {allowed}, and is a {type(module).__name__}"
            )
        elif style in ("column", "row"):
            size = module.weight.shape[0 if style == "column" else 1]
            if size % tp:
                where = f"{every_layer(name)}.weight, {size} {'rows' if style == 'column' else 'columns'}"
                faults.append(f"parallelism.tensor_parallel_degree = {tp}: does not divide {where}")
    return list(dict.fromkeys(faults))


def styles_of(model: nn.Module, family: Family) -> tuple[dict[str, str], list[str]]:
    """The style name of every module that has parameters of its own, and the faults of the table.

    An nn.Identity marks a place in the flow of data, and the table says what happens there.
    """
    holders = [name for name, module in model.named_modules() if module._parameters or isinstance(module, nn.Identity)]
    return match_table(family.module.sharding(family.config), holders, "sharding")


def apply_tensor_parallel(model: nn.Module, family: Family, tp: DeviceMesh) -> None:
    """Turns each parameter into a DTensor on the tp mesh and hangs each style's redistributions on its module."""
    for name, style_name in styles_of(model, family)[0].items():
        module = model.get_submodule(name)
        style = _EMBEDDING if style_name == "vocab" and isinstance(module, nn.Embedding) else STYLES[style_name]
        for key, parameter in module.named_parameters(recurse=False):
            placement = style.weight if parameter.ndim > 1 else style.bias
            shared = getattr(module, "SPLIT", {}).get(key)  # of an adapter
            if shared is not None and placement != Shard(shared):
                placement = Replicate()
            split = nn.Parameter(distribute_tensor(parameter, tp, [placement]), requires_grad=parameter.requires_grad)
            module.register_parameter(key, split)
        if style.before is not None:
            module.register_forward_pre_hook(
                lambda _, args, before=style.before, name=name: (before(name, args[0], tp), *args[1:])
            )
        if style.after is not None:
            module.register_forward_hook(lambda _, args, out, after=style.after: after(out, tp))
    tie(model)


def needs_fsdp(config: Config, ranks: int) -> str:
    """Why FSDP2 is needed: what there is to gather, to fetch, or to accumulate in another precision; "" where nothing is."""
    reasons = {
        f"there are {ranks} processes": ranks > 1,
        "parallelism.cpu_offload = true": config.parallelism.cpu_offload,
        "float8.enable_fsdp_float8_all_gather = true": config.float8.enable_fsdp_float8_all_gather,
        "parallelism.reduce_every_microbatch = false": not config.parallelism.reduce_every_microbatch,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def cast_where_used(model: nn.Module, dtype: torch.dtype, again: bool) -> None:
    """Has a model compute in `dtype` with parameters that stay what they are: FSDP2's mixed precision, for one process.

    Call it before what recomputes or compiles, so that casts are done again, or are parts of other kernels. Embeddings are cast
    after the look-up, the output projection by the head: the same numbers, but no cast copy of either is kept, and their
    gradients arrive in the precision of the masters.

    again: where nothing is compiled, cast anew in the backward pass, as FSDP2 gathers anew, instead of keeping what was cast.
    Recomputation does so by itself.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    apart = set()
    if type(model.embed) is nn.Embedding:
        model.embed.register_forward_hook(lambda module, args, out: out.to(dtype))
        apart.add("embed.weight")
    if model.head is not None and type(model.head).forward is Head.forward:
        apart.add("head.output.weight")
    left = {name for name, p in named.items() if p.dtype != dtype} - apart
    units = {f"layers.{index}.": layer for index, layer in model.layers.items()}
    if model.head is not None:
        units["head."] = model.head
    for prefix, unit in [*units.items(), ("", model)]:  # last what is in no unit, a table of positions, say
        names = {name.removeprefix(prefix) for name in left if name.startswith(prefix)}
        left -= {prefix + name for name in names}
        if names:
            vars(unit)["_as_it_was"] = _AsItWas(unit, type(unit).forward)  # not as a submodule: it holds the unit
            unit.__class__ = _casting_class(type(unit), tuple(sorted(names)), dtype, again)


class _AsItWas(nn.Module):
    """A module before it casts, in the form that `functional_call` wants."""

    def __init__(self, unit: nn.Module, inner: Callable[..., Any]):
        super().__init__()
        self.unit, self.inner = unit, inner

    def forward(self, *args: Any, **keys: Any) -> Any:
        return self.inner(self.unit, *args, **keys)


@functools.cache
def _casting_class(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype, again: bool) -> type[nn.Module]:
    """The class of modules that see parameters of these names cast; one class for all blocks, so that one graph serves all."""

    def forward(self: Any, *args: Any, **keys: Any) -> Any:
        cast = {f"unit.{name}": self.get_parameter(name).to(dtype) for name in names}
        if torch.compiler.is_compiling() or not again:
            return functional_call(self._as_it_was, cast, args, keys)
        with _kept_as_masters(self, cast):
            return functional_call(self._as_it_was, cast, args, keys)

    return type(f"Casting{kind.__name__}", (kind,), {"forward": forward})


def _kept_as_masters(unit: nn.Module, cast: dict[str, Tensor]) -> saved_tensors_hooks:
    """While it lasts, autograd keeps no cast parameter for the backward pass, but the master, to cast it anew."""
    masters = {part.untyped_storage().data_ptr(): name.removeprefix("unit.") for name, part in cast.items()}

    def pack(tensor: Tensor) -> Any:
        name = masters.get(tensor.untyped_storage().data_ptr())
        return tensor if name is None else (name, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        name, dtype, *view = kept
        return unit.get_parameter(name).to(dtype).as_strided(*view)

    return saved_tensors_hooks(pack, unpack)


def overlap_tensor_parallel(enable: bool, tp: DeviceMesh) -> None:
    """Has the compiler turn gather -> products and product -> sum into operations that do both at once, piece by piece.

    Its pass looks for these patterns in each graph ("async TP", the setting is one a process). In the backward pass of a gather
    whose sequence several matrices read, the sum of their products is no product: that one stays as it is.
    """
    torch._inductor.config._micro_pipeline_tp = enable
    if enable:
        with warnings.catch_warnings():  # 2.13 calls it needless; its own pass still asks whether it was done
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(tp.get_group().group_name)


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
