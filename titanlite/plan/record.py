"""Records what operations do as they pass PyTorch's dispatcher: the memory they hold, their FLOPs, what they send."""

import contextlib
import itertools
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import flop_registry

from titanlite.ground.torch_private import (
    TorchDispatchMode,
    cpu_attention,
    cpu_attention_backward,
    flash_attention,
    flash_attention_backward,
    is_traceable_wrapper_subclass_type,
    packet,
    placements_announced,
    resolve_process_group,
    schema,
    storage_of,
    tree_leaves,
)
from titanlite.parallel.mesh import DIMENSIONS
from titanlite.plan import experts
from titanlite.transforms.parameters import every_layer

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
# FSDP2 names its collectives for the profiler: "FSDP::all_gather (layers.0)".
_FSDP = re.compile(r"FSDP::(all_gather|post_backward_reduce|post_backward_accumulate) \((.+?)\)")
_LIBRARY = ("torch.", "contextlib", "titanlite.plan.fused", __name__)  # modules that send on behalf of their caller


class Channel(NamedTuple):
    """Collectives that one part of the program starts over one group that rank 0 is in."""

    sender: str  # a unit of FSDP2 and what it sends, or the function that starts the collective
    kind: str  # one of _KINDS, otherwise the name of PyTorch's operation
    over: tuple[str, ...]  # the smallest set of mesh dimensions that contains the group
    ranks: int  # of the group


class Traffic(NamedTuple):
    """What goes through a channel in one step."""

    calls: int = 0
    size: int = 0  # bytes of the whole tensors: the gathered one, or what each rank contributes to a sum
    sent: int = 0  # bytes that this rank sends, with ring algorithms

    def plus(self, more: "Traffic", often: int = 1) -> "Traffic":
        return Traffic(*(own + often * each for own, each in zip(self, more, strict=True)))


class Work(NamedTuple):
    """What rank 0 computes and sends."""

    flops: int  # of matmuls and attention, as torch.utils.flop_counter counts them
    traffic: dict[Channel, Traffic]

    def plus(self, more: "Work", often: int = 1) -> "Work":
        added = {key: self.traffic.get(key, Traffic()).plus(each, often) for key, each in more.traffic.items()}
        return Work(self.flops + often * more.flops, self.traffic | added)


def ring_bytes(kind: str, size: int, ranks: int) -> int:
    """Bytes that one of `ranks` ranks sends: (ranks - 1) parts of the tensor, twice for an all-reduce."""
    return round(size * (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks)


class _Observer(TorchDispatchMode):
    """Calls `see` after each operation on plain tensors."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # it only observes: compiled blocks stay compiled

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor, for example, dispatches again on the local tensors
        result = operation(*args, **(kwargs or {}))
        self.see(operation, args, kwargs or {}, result)
        return result

    def see(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        raise NotImplementedError


class Recorder(_Observer):
    """Sums the FLOPs and the collectives of all operations while it is active. Groups of one rank send nothing.

    slices: of `mesh_slices`. routing: of rows to experts that are split over ranks. What follows happens in the part `scope` of
    the program, and counts `often` times.
    """

    def __init__(self, slices: dict[tuple[str, ...], set[int]], routing: experts.Routing = "balanced") -> None:
        super().__init__()
        self._slices, self._routing = slices, routing
        self.scope, self.often = "", 1
        self._flops: Counter[str] = Counter()  # by scope
        self._traffic: dict[tuple[str, Channel], Traffic] = {}  # by scope too
        self._labels: list[str] = []  # of torch.profiler.record_function, innermost last

    def work(self, times: Callable[[str], int] = lambda _: 1) -> Work:
        """What has been recorded, that of each scope so many times."""
        traffic: dict[Channel, Traffic] = {}
        for (scope, channel), each in self._traffic.items():
            traffic[channel] = traffic.get(channel, Traffic()).plus(each, times(scope))
        return Work(sum(times(scope) * flops for scope, flops in self._flops.items()), traffic)

    def see(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given = _given(operation, args, kwargs)
        group = given.get("process_group", given.get("group_name"))
        if operation.namespace == "profiler":
            if "enter" in schema(operation).name:
                self._labels.append(args[0])
            elif self._labels:
                self._labels.pop()
        elif messages := experts.messages(operation, given, self._routing):
            self._flops[self.scope] += self.often * experts.flops(operation, given, self._routing)
            for what, group_name, calls, size, sent in messages:
                self._add(group_name, what, "all-to-all", Traffic(calls, size, sent))
        elif formula := _FORMULAS.get(packet(operation)) or flop_registry.get(packet(operation)):
            self._flops[self.scope] += self.often * formula(*args, **kwargs, out_val=result)
        elif group is not None:
            self._count(schema(operation).name, given, group, result)

    def _count(self, operation: str, given: dict[str, Any], group: Any, result: Any) -> None:
        """Adds a collective of PyTorch's."""
        flat = operation.partition("::")[2].replace("_", "")
        kind = next((kind for kind in _KINDS if kind.replace("-", "") in flat), operation.partition("::")[2])
        ranks = len(_members(group))
        size = max(_bytes(value) for value in (*given.values(), result))
        sent = ring_bytes(kind, size, ranks)
        if splits := given.get("input_split_sizes"):  # of an uneven all-to-all
            size = _bytes(given["input"])
            sent = size - size * splits[dist.get_rank(_resolved(group))] // max(1, sum(splits))
        if ranks > 1:
            self._add(group, self._sender(), kind, Traffic(1, size, sent))

    def _add(self, group: Any, sender: str, kind: str, more: Traffic) -> None:
        members = _members(group)
        over = next(names for names, ranks in self._slices.items() if ranks.issuperset(members))
        key = self.scope, Channel(sender, kind, over, len(members))
        self._traffic[key] = self._traffic.get(key, Traffic()).plus(more, self.often)

    def _sender(self) -> str:
        for label in reversed(self._labels):
            if match := _FSDP.match(label):
                return f"{every_layer(match[2])}: {'parameters' if match[1] == 'all_gather' else 'gradients'}"
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", _LIBRARY[0]).startswith(
            _LIBRARY
        ):  # generated code has none
            frame = frame.f_back
        if frame is None or frame.f_code.co_name == "forward_backward":
            return "backward"  # autograd, which undoes what the forward pass has sent
        return f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_name}"


def mesh_slices(mesh: DeviceMesh) -> dict[tuple[str, ...], set[int]]:
    """For each set of mesh dimensions, the smallest first, the ranks that differ from rank 0 in these dimensions only."""
    used = [name for name in DIMENSIONS if mesh[name].size() > 1]
    return {
        names: set(mesh.mesh[tuple(slice(None) if name in names else 0 for name in DIMENSIONS)].flatten().tolist())
        for count in range(1, len(used) + 1)
        for names in itertools.combinations(used, count)
    }


def _given(operation: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name."""
    return {argument.name: value for argument, value in zip(schema(operation).arguments, args, strict=False)} | kwargs


def _resolved(group: Any) -> Any:
    """The group that an operation has as an object or by its name."""
    resolve: Any = resolve_process_group if isinstance(group, str) else dist.ProcessGroup.unbox
    return resolve(group)


def _members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(_resolved(group))


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, matmuls: int) -> int:
    """(batch, heads, queries, dim) and (batch, heads, keys, dim); every score is counted, causal or not."""
    return matmuls * 2 * query.numel() * key.shape[-2]


# Where PyTorch's table, to which models may add operations of their own, has no formula, or a wrong one. It lacks the CPU's
# attention kernel, and 2.11's takes no grouped queries: two matmuls forward; backward the scores again and four gradients.
_FORMULAS: dict[Any, Callable[..., int]] = {
    # PyTorch's own fails for the dtype of the result, which the head gives
    torch.ops.aten.addmm: lambda _, a, b, *__, **___: flop_registry[torch.ops.aten.mm](a, b),
    **dict.fromkeys((cpu_attention, flash_attention), lambda q, k, *_, **__: _attention_flops(q, k, 2)),
    **dict.fromkeys((cpu_attention_backward, flash_attention_backward), lambda _, q, k, *__, **___: _attention_flops(q, k, 5)),
}


_IN_KERNEL = ContextVar("in_kernel", default=False)


@contextlib.contextmanager
def in_kernel(inside: bool) -> Iterator[None]:
    """Within it, operations are parts of a kernel that keeps their results in registers, if `inside`: they have no memory."""
    before = _IN_KERNEL.set(inside)
    try:
        yield
    finally:
        _IN_KERNEL.reset(before)


class Allocations(_Observer):
    """Follows the memory of all tensors that operations return, by the scope of the program that `enter` names.

    Peaks include what the exchange of experts' rows allocates and frees in itself, with the worst routing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scope = ""
        self.peaks: dict[str, int] = {}  # scope -> the most bytes while it was the current one
        self._paused, self._patches = False, contextlib.ExitStack()
        # with the scope that allocated it, and the bytes that do not count
        self._storages: dict[int, tuple[weakref.ref, str, int]] = {}

    def see(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if self._paused or _IN_KERNEL.get():
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage, number = tensor.untyped_storage(), storage_of(tensor)
                if self._storages.get(number, (lambda: None,))[0]() is None:
                    self._storages[number] = weakref.ref(storage), self.scope, 0
        self._note(experts.temporary_bytes(operation, _given(operation, args, kwargs)))

    def __enter__(self) -> Any:
        """DTensor derives placements on tensors of whole shapes, which no rank has: they do not count."""
        self._patches.enter_context(placements_announced(self._pause))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def begin(self) -> None:
        """Counts only what is allocated from here on, and not what is freed of before.

        When Python collects garbage, and when a thread of gloo gives back a tensor, is chance.
        """
        alive = ((key, ref, scope, ref()) for key, (ref, scope, _) in self._storages.items())
        self._storages = {key: (ref, scope, storage.nbytes()) for key, ref, scope, storage in alive if storage is not None}
        self.peaks.clear()

    def enter(self, scope: str) -> None:
        """What follows happens in `scope`."""
        self.scope = scope
        self._note(0)

    def _note(self, temporary: int) -> None:
        self.peaks[self.scope] = max(self.peaks.get(self.scope, 0), self.live() + temporary)

    def live(self) -> int:
        """Bytes that are allocated now, since `begin`."""
        return sum(self.live_by_scope().values())

    def live_by_scope(self) -> Counter[str]:
        """Bytes that are allocated now, since `begin`, by the scope that allocated them."""
        sizes: Counter[str] = Counter()
        for key, (ref, scope, before) in list(self._storages.items()):
            if (storage := ref()) is None:
                del self._storages[key]
            else:
                sizes[scope] += storage.nbytes() - before
        return sizes
