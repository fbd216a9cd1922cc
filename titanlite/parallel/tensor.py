"""Tensor and sequence parallelism: what the names of a sharding table mean, and checks of such a table.

Modules pass plain local tensors: slices (batch, seq / tp, dim) on the residual path, (batch, seq, heads / tp, ...) inside
attention. Splitting the tokens outside of the matrices is sequence parallelism (Korthikanti et al., arXiv:2205.05198).
A rank's slice is a contiguous part of the microbatch's tokens, (batch x seq), viewed as (batch, seq / tp). Collectives
concatenate the ranks' buffers, so that a slice of each sequence would have to be copied before and after each of them.
All redistributions are synchronous: an AsyncCollectiveTensor that enters a compiled block loses its gradient.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.fx import Graph

from models.decoder import Decoder
from models.further import further_of
from models.moe import Experts
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import (
    collectives,
    enable_symm_mem_for_group,
    gradient_hooks,
    has_parameters,
    set_async_tensor_parallel,
)
from titanlite.registry.family import Family
from titanlite.transforms.float8 import linear_layers
from titanlite.transforms.lora import LoraLinear
from titanlite.transforms.parameters import every_layer, is_tied, keeping_ties, match_table, tied_names

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class Style(NamedTuple):
    """The meaning of one name in a sharding table."""

    weight: Placement  # of two-dimensional parameters, on the tp mesh
    bias: Placement  # of one-dimensional parameters
    kinds: tuple[type[nn.Module], ...] = (nn.Module,)  # the modules that it is for
    before: Callable[[str, Tensor, DeviceMesh], Tensor] | None = None  # (module's name, its first argument, tp mesh)
    after: Callable[[Any, DeviceMesh], Tensor] | None = None  # (its output, tp mesh)


def _expect_gathered(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    if not isinstance(x, DTensor):
        raise UserError(f"sharding: {name} is 'column' and must read what a 'sequence' module returns, the whole sequence")
    return x


def _wrap_features(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    if isinstance(x, DTensor):
        raise UserError(f"sharding: {name} is 'row' and must read this rank's features, the output of 'column' modules")
    return DTensor.from_local(x, tp, [Shard(-1)], run_check=False)


def _wrap_tokens(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    # as the slices of all ranks, one after the other: (batch x tp, seq / tp)
    return DTensor.from_local(x.unflatten(1, (tp.size(), -1)).flatten(0, 1), tp, [Replicate()], run_check=False)


def _wrap_local(name: str, x: Tensor, tp: DeviceMesh) -> Tensor:
    # DTensor multiplies the local values whichever dimension is split, except the last; only the first needs no strided shard
    return x if isinstance(x, DTensor) else DTensor.from_local(x, tp, [Shard(0)], run_check=False)


def _unwrap_local(x: DTensor, tp: DeviceMesh) -> Tensor:
    return x if x.placements[0].is_replicate() else x.to_local()  # a gathered sequence stays gathered


def _scatter_tokens(x: DTensor, tp: DeviceMesh) -> Tensor:
    # (batch x seq, ...): what the compiler's pass of async TP matches has two dimensions
    flat: Any = x.flatten(0, 1)
    return flat.redistribute(tp, [Shard(0)]).to_local().unflatten(0, (x.shape[0], -1))


def _scatter_embedded(x: DTensor, tp: DeviceMesh) -> Tensor:
    # FSDP registers its backward hook on the output, and warns of views, whose hook an in-place operation would drop
    return x.redistribute(tp, [Shard(0)]).to_local().clone()


def _gather_tokens(x: Tensor, tp: DeviceMesh) -> Tensor:
    flat = DTensor.from_local(x.flatten(0, 1), tp, [Shard(0)], run_check=False)
    return flat.redistribute(tp, [Replicate()]).unflatten(0, (x.shape[0], -1))


STYLES: dict[str, Style] = {
    # Linear, output features split; reads the whole sequence, returns this rank's features
    "column": Style(Shard(0), Shard(0), (nn.Linear,), before=_expect_gathered, after=lambda x, tp: x.to_local()),
    # Linear, input features split; reads this rank's features, sums over ranks, returns this rank's slice of the tokens
    "row": Style(Shard(1), Replicate(), (nn.Linear,), before=_wrap_features, after=_scatter_tokens),
    # Embedding or output projection, vocabulary split, evenly or not
    "vocab": Style(Shard(0), Shard(0), (nn.Linear, nn.Embedding)),
    # works on this rank's slice of the tokens with whole weights, and returns the gathered sequence
    "sequence": Style(Replicate(), Replicate(), after=_gather_tokens),
    # whole weights, applied to this rank's heads or its slice of the tokens; gradients are summed over ranks
    "replicate": Style(Replicate(), Replicate()),
    # the same for the experts of an MoE layer, unless expert parallelism has split them
    "experts": Style(Replicate(), Replicate(), (Experts,)),
    # weights of features, split like the output of a "column" module; the module itself communicates between ranks
    "features": Style(Shard(0), Shard(0)),
}
_LOCAL_LINEAR = Style(Replicate(), Replicate(), before=_wrap_local, after=_unwrap_local)  # a Linear whose style is "replicate"
_EMBEDDING = Style(Shard(0), Shard(0), before=_wrap_tokens, after=_scatter_embedded)


def sharding_faults(model: Decoder, family: Family, tp: int, given: str = "") -> list[str]:
    """Faults of a family's sharding table: parameters without a style, unknown styles, sizes that tp does not divide; and
    `layers` with a block twice, which is one unit of FSDP, compile and recomputation; tied parameters of different units or
    styles; hooks on parameters. given: how the user has said tp, if not by the key of a run."""
    styles, faults = styles_of(model, family)
    blocks = [*model.layers.values()]
    if again := next((name for number, (name, block) in enumerate(model.layers.items()) if block in blocks[:number]), ""):
        faults.append(f"layers.{again} is an earlier block again; put it there once, and call it twice in Model.forward")
    if hooked := next((name for name, each in model.named_parameters() if gradient_hooks(each, accumulated=True)), ""):
        how = "register_post_accumulate_grad_hook in after_building of hooks.modules"
        faults.append(
            f"{hooked} has a hook of its constructor, which the parameter that is trained in its place has not; use {how}"
        )
    for name, style in styles.items():
        module, kind = model.get_submodule(name), every_layer(name)
        if style not in STYLES:
            faults.append(f"sharding: {kind} has the unknown style {style!r}; there are: {', '.join(STYLES)}")
        elif not isinstance(module, allowed := STYLES[style].kinds):
            names = " or ".join(each.__name__ for each in allowed)
            faults.append(f"sharding: {kind} is {style!r}, which is for {names}, and is a {type(module).__name__}")
        elif style in ("column", "row"):
            size = module.get_parameter("weight").shape[0 if style == "column" else 1]
            if size % tp:
                where = f"{kind}.weight, {size} {'rows' if style == 'column' else 'columns'}"
                faults.append(f"{given or _key(tp)}: does not divide {where}")
        elif style == "vocab" and (rows := len(module.get_parameter("weight"))) <= -(-rows // tp) * (tp - 1):
            faults.append(f"{given or _key(tp)}: leaves ranks without one of the {rows} rows of {kind}.weight")
    faults += [fault for name, first in tied_names(model).items() for fault in _tie_faults(model, styles, name, first)]
    return list(dict.fromkeys(faults))


def _tie_faults(model: Decoder, styles: dict[str, str], name: str, first: str) -> Iterator[str]:
    """What excludes two names of a tied parameter. Modules that blocks share have one style, and are not a unit of a block."""
    owner, of_first = (each.rpartition(".")[0] for each in (name, first))
    what = f"{name} and {first} are one parameter"
    if model.get_submodule(owner) is model.get_submodule(of_first):
        return
    if _unit(model, name) != _unit(model, first):
        yield f"{what}, and parts of the model that FSDP gathers at different times; let these parts share its module"
    theirs, ours = styles.get(owner), styles.get(of_first)
    which = "weight" if model.get_parameter(name).ndim > 1 else "bias"
    if theirs in STYLES and ours in STYLES and getattr(STYLES[theirs], which) != getattr(STYLES[ours], which):
        yield f"sharding: {what}, which {theirs!r} and {ours!r} split differently"


def _unit(model: Decoder, name: str) -> list[str]:
    """The part of a model that FSDP gathers with a parameter: its block, the embedding, the head, these two, or the rest."""
    parts = name.split(".")
    if parts[0] in ("layers", "further"):
        return parts[:2]
    return [] if parts[0] not in ("embed", "head") else ["ends"] if is_tied(model) else parts[:1]


def styles_of(model: nn.Module, family: Family) -> tuple[dict[str, str], list[str]]:
    """The style name of every module that has parameters of its own, and the faults of the table.

    An nn.Identity marks a point in the data flow, for which the table gives a style.
    """
    holders = [name for name, module in model.named_modules() if has_parameters(module) or isinstance(module, nn.Identity)]
    # norms and projection work on this rank's tokens; first, since a family may have a pattern for all norms
    own = {"further.*": "replicate"} if further_of(model) else {}
    return match_table(own | family.module.sharding(family.config), holders, "sharding")


def apply_tensor_parallel(model: Decoder, family: Family, tp: DeviceMesh) -> None:
    """Makes each parameter a DTensor on the tp mesh, and hooks each style's redistributions to its module, unless tp is 1.

    `sharding_faults` must have found none in the family's sharding table.
    """
    model.tensor_parallel = tp.size()
    if tp.size() == 1:
        return
    with keeping_ties(model):
        for name, style_name in styles_of(model, family)[0].items():
            module = model.get_submodule(name)
            style = STYLES[style_name]
            if isinstance(module, Experts) and module.exchange is not None:
                continue
            if style_name == "vocab" and isinstance(module, nn.Embedding):
                style = _EMBEDDING
            elif style_name == "replicate" and isinstance(module, nn.Linear):
                style = _LOCAL_LINEAR
            for key, parameter in module.named_parameters(recurse=False):
                placement = style.weight if parameter.ndim > 1 else style.bias
                shared = module.SPLIT.get(key) if isinstance(module, LoraLinear) else None
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


def overlap_tensor_parallel(enable: bool, tp: DeviceMesh) -> None:
    """Makes the compiler fuse all-gather -> matmuls and matmul -> reduce-scatter into operations that overlap both by chunks.

    Its pass matches these patterns in each graph ("async TP"; one setting a process). Where several matrices read a gathered
    sequence, the backward pass sums their results, which does not match, and stays as it is.
    """
    set_async_tensor_parallel(enable, read_flat)
    if enable:
        with warnings.catch_warnings():  # 2.13 deprecates the call, and its own pass still requires it
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(tp.get_group().group_name)


def read_flat(graph: Graph) -> None:
    """Removes views between a collective's result and operations that read it in its original shape.

    Gathered tokens are flat, as matmuls read them, and modules see a view (batch, seq, dim) in between. The compiler removes
    these views where one operation reads the result. Where several do, its async TP pass finds no matmul behind the views.
    """
    for node in graph.nodes:
        source = node
        while source.target in _VIEWS:
            source = source.args[0]
        if source.target is not collectives.wait_tensor.default or source is node:
            continue
        if source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


# ------------------------------------------------------------------------------------------------------------------ the check

# Dimensions of a model's Config, and of its modules, of which every tensor-parallel rank takes an equal share.
_SPLIT_DIMENSIONS = ("n_heads", "n_kv_heads", "ffn_dim")


def undivided_sizes(family: Family, model: nn.Module, tensor: int) -> list[str]:
    """The dimensions of a family, such as "n_heads = 3", that `tensor` ranks cannot split equally.

    A layer may have other sizes than the Config says, and the rows of its matrices may divide where its heads do not. So every
    module counts that has a part whose output features are split.
    """
    split = [name for name, style in styles_of(model, family)[0].items() if style == "column"]
    above = {name[:end] for name in split for end, letter in enumerate(name) if letter == "."}
    owners = {"": family.config} | {path: module for path, module in model.named_modules() if path in above}
    found: dict[str, list[str]] = {}  # size -> where; "" is the Config
    for path, owner in owners.items():
        for name in _SPLIT_DIMENSIONS:
            size = getattr(owner, name, tensor)
            if isinstance(size, int) and size % tensor:
                found.setdefault(f"{name} = {size}", []).append(path)
    return [size if "" in paths else f"{size} in {' and '.join(paths)}" for size, paths in found.items()]


def split_faults(family: Family, model: Decoder, tp: int, title: str, given: str = "") -> Iterator[str]:
    """Why `tp` ranks cannot split a model on the meta device. given: as for `sharding_faults`."""
    if undivided := undivided_sizes(family, model, tp):
        yield f"{given or _key(tp)}: does not divide {', '.join(undivided)} of {title}"
    # widths of matrices follow from the dimensions, so that one fault is enough
    yield from sharding_faults(model, family, 1 if undivided else tp, given)


def _key(tp: int) -> str:
    return f"parallelism.tensor_parallel_degree = {tp}"


def faults(config: Config, family: Family, model: Decoder) -> Iterator[str]:
    """What tensor parallelism needs of a model, on the meta device."""
    yield from split_faults(family, model, config.parallelism.tensor_parallel_degree, config.model.title)
    if config.float8.enable and not config.lora.enable:
        yield from linear_layers(model, config, styles_of(model, family)[0])[1]
