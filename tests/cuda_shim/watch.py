"""Finds operations on a simulated GPU that would be faults on a real one: raises `Fault`, with operation and line."""

import contextlib
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from models.all_to_all import exchange_counts
from models.exchange import combine_experts, dispatch_experts, experts_backward
from models.grouped import grouped_outer, grouped_product
from tests.cuda_shim import pretend

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
# A GPU computes float64 at 1/64 of float32's rate, data-centre GPUs at 1/2. A few values per parameter cost nothing.
_FEW = 1024
# Our own operations, whose implementation fake tensors would not run.
_INSIDES: dict[Any, Any] = {
    operation._opoverload: operation._init_fn
    for operation in (exchange_counts, dispatch_experts, combine_experts, experts_backward, grouped_product, grouped_outer)
}
# The one function that may wait for the device in a step: the sizes of messages must be known. The cell says how often.
_COUNTS = "models.all_to_all", "_on_host"
_OURS = ("titanlite", "models", "tests")
_NOT_OURS = (__name__, pretend.__name__)


class Fault(Exception):
    """Something that must not happen on a GPU."""


class Watch:
    """Watches the operations of a FakeTensorMode.

    Outside of `step` the host may wait for the device, as a report does. Fake tensors have no values: if the program reads one
    on the host, it gets False from a bool tensor, and 1 from others. So every rank sends one row to every other.

    offloaded: the optimizer runs on the host and needs the gradients there. The optimizer, and FSDP2 when it accumulates
    gradients, wait for them.
    """

    def __init__(self, mode: FakeTensorMode, offloaded: bool = False):
        self.operations: set[str] = set()  # those with a tensor on the device, in steps
        self.latest: set[str] = set()  # those that had one, in any part of the program; who needs them clears it before
        self.waits_for_counts = 0  # in steps
        self._mode = mode
        self._written: dict[Any, tuple[Any, pretend.Stream, int]] = {}  # storage -> itself and its writer in steps
        self._strict, self._offloaded = False, offloaded
        self._dispatch, self._pinned = mode.dispatch, {}
        mode.dispatch = self._watched
        pretend.sync_listeners.append(self._host_sync)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A part of the program in which the host must not wait for the device."""
        self._strict = True
        try:
            yield
        finally:
            self._strict = False

    def close(self) -> None:
        pretend.sync_listeners.remove(self._host_sync)

    def _host_sync(self, what: str) -> None:
        if not (self._offloaded and what == "Event.synchronize()"):
            self._forbid(what, "host sync")

    def _watched(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in given)
        if operation is _aten._local_scalar_dense.default:
            if on_device:
                self._forbid(operation, "host sync")
            return False if args[0].dtype == torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        if operation is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        run, pins = operation, operation is _aten._pin_memory.default
        if pins:  # FakeTensorMode lacks pinning
            run, args, kwargs = _aten.clone.default, args[:1], {}
        try:
            result = self._dispatch(run, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not any(isinstance(tensor, FakeTensor) for tensor in given):  # the ranks of a mesh, on the host
                with unset_fake_temporarily():
                    return operation(*args, **kwargs)
            raise Fault(f"host sync: {operation}{_place()}: its result depends on values") from error
        except RuntimeError as error:
            if "device" in str(error) and len({tensor.device for tensor in given}) > 1:
                kinds = ", ".join(f"{tensor.device.type} {tuple(tensor.shape)}" for tensor in given)
                raise Fault(f"two devices: {operation}{_place()}: {kinds}") from error
            raise
        if result is NotImplemented:  # a tensor subclass dispatches again on its inner tensors
            return result
        if on_device:
            self.latest.add(str(operation))
        if self._strict and on_device and operation in _INSIDES:
            with self._mode:
                _INSIDES[operation](*args, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if pins or kwargs.get("pin_memory"):
            for tensor in made:
                storage = tensor.untyped_storage()
                self._pinned[storage._cdata] = weakref.ref(storage)
        if self._strict and (pins or on_device or any(tensor.device.type == "cuda" for tensor in made)):
            self._judge(operation, args, kwargs, given, made)
        return result

    def _judge(self, operation: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        self.operations.add(str(operation))
        self._judge_streams(operation, given, made)
        if operation in _COPIES:
            self._judge_copy(operation, args, kwargs, made[0])
        on_device = [tensor for tensor in (*given, *made) if tensor.device.type == "cuda"]
        largest = max((tensor.numel() for tensor in on_device), default=0)
        dtypes = [tensor.dtype for tensor in on_device] + tree_leaves((args, kwargs))
        if largest > _FEW and any(dtype is torch.float64 for dtype in dtypes):
            self._forbid(operation, f"float64 kernel on {largest:,} values")
        if on_device and _name(operation) in _WITHOUT_CUDA:
            self._forbid(operation, "no CUDA kernel")

    def _judge_streams(self, operation: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """No kernel may read what another stream may not have written yet. Not checked in the backward pass, where autograd
        chooses the streams and waits: the shim has one stream for it. Recomputation and hooks are checked there too.
        """
        stream, (module, _) = pretend.current_stream(), _function()
        if getattr(operation, "is_view", False) or operation.namespace == "prim":  # no kernel
            return
        for tensor in given:
            storage, writer, number = self._written.get(tensor.untyped_storage()._cdata, (None, stream, 0))
            if module and storage is not None and storage() is not None and not stream.comes_after(writer, number):
                self._forbid(operation, "race: it does not wait for the stream that writes what it reads")
        stream.done += 1
        for tensor in made:
            if tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                self._written[storage._cdata] = weakref.ref(storage), stream, stream.done

    def _judge_copy(self, operation: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        source = args[1] if operation is _aten.copy_.default else args[0]
        options = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs
        if source.device.type == result.device.type or not source.numel():
            return
        to_host = result.device.type == "cpu"
        self.operations.add(f"a copy of {source.ndim} dimensions from {source.device.type} to {result.device.type}")
        if not options.get("non_blocking"):
            if to_host and _function() == _COUNTS:
                self.waits_for_counts += 1
            elif not (to_host and self._offloaded):
                self._forbid(operation, f"host sync: a blocking copy from {source.device.type} to {result.device.type}")
        elif not to_host and not self._is_pinned(source):
            self._forbid(operation, "pageable copy: the source is not pinned, so the host waits")

    def _forbid(self, operation: Any, what: str) -> None:
        if self._strict:
            raise Fault(f"{what}: {operation}{_place()}")

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata in self._pinned and self._pinned[storage._cdata]() is not None


def _place() -> str:
    """The innermost line of the program in this thread; an autograd thread has none."""
    frame = _innermost()
    if frame is None:
        return " in the backward pass"
    return f" in {frame.f_globals['__name__']}:{frame.f_lineno} {frame.f_code.co_name}"


def _function() -> tuple[str, str]:
    """Module and name of the innermost function of the program in this thread."""
    frame = _innermost()
    return ("", "") if frame is None else (frame.f_globals["__name__"], frame.f_code.co_name)


def _innermost() -> Any:
    """The innermost frame of the program in this thread, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in _OURS and name not in _NOT_OURS:
            return frame
        frame = frame.f_back
    return None


def _name(operation: Any) -> str:
    """As in the table below; "" for operations that are not PyTorch's own."""
    schema = getattr(operation, "_schema", None)
    if schema is None or operation.namespace != "aten":
        return ""
    return ".".join(filter(None, (schema.name.removeprefix("aten::"), schema.overload_name)))


def _operations_without_cuda() -> set[str]:
    """Operations with kernels only for other devices, by the table from which PyTorch is generated."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found = set()
    for entry in re.split(r"^- func: ", table.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        kernels = re.search(r"^  dispatch:\n((?:    .*\n)+)", entry, re.MULTILINE)
        if kernels and not re.search(r"CUDA|Composite", kernels[1]) and "structured_delegate" not in entry:
            found.add(entry.partition("(")[0])
    return found


_WITHOUT_CUDA = _operations_without_cuda()
