"""Mixed precision without FSDP2, for one process: parameters are cast where they are used."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from models.decoder import Decoder
from models.head import Head


def cast_where_used(model: Decoder, dtype: torch.dtype, again: bool) -> None:
    """Makes a model compute in `dtype` without changing its parameters: FSDP2's mixed precision, for one process.

    Call it before recomputation and compilation, so that casts are recomputed, or fused into other kernels. Embeddings are cast
    after the look-up, the output projection by the head: the numbers are the same, no cast copy of either is kept, and their
    gradients arrive in the masters' precision.

    again: where nothing is compiled, repeat the cast in the backward pass, as FSDP2 repeats its gather, instead of keeping the
    copy. Recomputation does so anyway.
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
    for prefix, unit in [*units.items(), ("", model)]:  # last the parameters outside of units, such as a table of positions
        names = {name.removeprefix(prefix) for name in left if name.startswith(prefix)}
        left -= {prefix + name for name in names}
        if names:
            vars(unit)["_as_it_was"] = _AsItWas(unit, type(unit).forward)  # a submodule would contain its parent
            kind: Any = type(unit)
            unit.__class__ = _casting_class(kind, tuple(sorted(names)), dtype, again)


class _AsItWas(nn.Module):
    """A module without its cast, in the form that `functional_call` takes."""

    def __init__(self, unit: nn.Module, inner: Callable[..., Any]):
        super().__init__()
        self.unit, self.inner = unit, inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self.unit, *args, **kwargs)


@functools.cache
def _casting_class(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype, again: bool) -> type[nn.Module]:
    """The class of modules that cast the parameters of these names; all blocks share it, so that one graph serves all."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cast = {f"unit.{name}": self.get_parameter(name).to(dtype) for name in names}
        if torch.compiler.is_compiling() or not again:
            return functional_call(self._as_it_was, cast, args, kwargs)
        with _kept_as_masters(self, cast):
            return functional_call(self._as_it_was, cast, args, kwargs)

    return type(f"Casting{kind.__name__}", (kind,), {"forward": forward})


def _kept_as_masters(unit: nn.Module, cast: dict[str, Tensor]) -> saved_tensors_hooks:
    """Makes autograd keep the master instead of its cast copy, and repeat the cast in the backward pass."""
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
