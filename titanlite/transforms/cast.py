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
    named = dict(model.named_parameters(remove_duplicate=False))
    uncast = set()
    if type(model.embed) is nn.Embedding:
        model.embed.register_forward_hook(lambda module, args, out: out.to(dtype))
        uncast.add("embed.weight")
    if model.head is not None and type(model.head).forward is Head.forward:
        uncast.add("head.output.weight")
    left = {name for name, p in named.items() if p.dtype != dtype} - uncast
    separate, cast = {*apart}, set[nn.Module]()
    units = {f"{name}.": module for name, module in model.named_modules(remove_duplicate=False) if module in separate}
    units |= {f"layers.{index}.": layer for index, layer in model.layers.items()}
    for index, each in further_of(model).items():
        units |= {f"further.{index}.block.": each.block, f"further.{index}.": each}
    # called outside of the model's forward pass too, the embedding by MTP modules
    units |= {f"{name}.": end for name, end in (("embed", model.embed), ("head", model.head)) if end is not None}
    for prefix, unit in [*units.items(), ("", model)]:  # last the parameters outside of units, such as a table of positions
        names = {name.removeprefix(prefix) for name in left if name.startswith(prefix)}
        left -= {prefix + name for name in names}
        if names and unit not in cast:  # under another name, where blocks share it
            cast.add(unit)
            kind: Any = type(unit)
            unit.__class__ = _casting_class(kind, tuple(sorted(names)), dtype, again)


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
