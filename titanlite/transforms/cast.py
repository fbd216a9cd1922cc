"""Mixed precision without FSDP2, for one process: parameters are cast where they are used."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from models.decoder import Decoder
from models.further import further_of
from models.head import Head
from titanlite.ground.torch_private import reparametrize_module, storage_of


def cast_where_used(model: Decoder, dtype: torch.dtype, again: bool, apart: Iterable[nn.Module] = ()) -> None:
    """Makes a model compute in `dtype` without changing its parameters: FSDP2's mixed precision, for one process.

    Call it before recomputation and compilation, so that casts are recomputed, or fused into other kernels. Embeddings are cast
    after the look-up, the output projection by the head: the numbers are the same, no cast copy of either is kept, and their
    gradients arrive in the masters' precision.

    again: where nothing is compiled, repeat the cast in the backward pass instead of keeping the copy, as FSDP2 repeats its
    all-gather. Activation checkpointing does so without it. apart: modules within blocks that cast their own parameters,
    because they are recomputed separately.
    """
    done: dict[nn.Module, set[tuple[nn.Module, str]]] = {}  # what a unit casts: a module and the name of a parameter
    uncast = set[tuple[nn.Module, str]]()
    if type(model.embed) is nn.Embedding:
        model.embed.register_forward_hook(lambda module, args, out: out.to(dtype))
        uncast.add((model.embed, "weight"))
    if model.head is not None and type(model.head).forward is Head.forward:
        uncast.add((model.head.output, "weight"))
    further = [part for each in further_of(model).values() for part in (each.block, each)]
    # Inner units first, last the parameters outside of units, such as a table of positions. Embedding and head are called
    # outside of the model's forward pass too, the embedding by MTP modules.
    for unit in [*apart, *model.layers.values(), *further, model.embed, model.head, model]:
        if unit is None or unit in done:  # blocks may share one
            continue
        left = uncast.union(*(done.get(module, ()) for module in unit.modules()))
        # One name for each, since modules may have several, and a cast parameter is none.
        names = {
            (module, key): f"{path}.{key}".lstrip(".")
            for path, module in unit.named_modules()
            for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if p.dtype != dtype and (module, key) not in left
        }
        done[unit] = {*names}
        if names:
            kind: Any = type(unit)
            unit.__class__ = _casting_class(kind, tuple(sorted(names.values())), dtype, again)


@functools.cache
def _casting_class(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype, again: bool) -> type[nn.Module]:
    """The class of modules that cast the parameters of these names. All blocks share it, so that they compile once."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cast = {name: self.get_parameter(name).to(dtype) for name in names}
        kept: Any = _kept_as_masters(self, cast) if again and not torch.compiler.is_compiling() else contextlib.nullcontext()
        # As torch.func.functional_call replaces parameters; that would call the module, and so this function again.
        with kept, reparametrize_module(self, cast):
            return kind.forward(self, *args, **kwargs)

    return type(f"Casting{kind.__name__}", (kind,), {"forward": forward})


def _kept_as_masters(unit: nn.Module, cast: dict[str, Tensor]) -> saved_tensors_hooks:
    """Makes autograd keep the master instead of its cast copy, and repeat the cast in the backward pass."""
    # by the storage itself: those of a prediction (titanlite/plan) have no memory, and so all the same address
    masters = {storage_of(part): name for name, part in cast.items()}

    def pack(tensor: Tensor) -> Any:
        name = masters.get(storage_of(tensor))
        return tensor if name is None else (name, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        name, dtype, *view = kept
        return unit.get_parameter(name).to(dtype).as_strided(*view)

    return saved_tensors_hooks(pack, unpack)
