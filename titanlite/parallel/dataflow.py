"""Which tensors the stages of a pipeline send: found by tracing the model on the meta device, block by block.

A stage runs the model's own `forward`. Blocks of other stages are not run: earlier ones return what was received from them,
and later ones return zeros, which nothing uses. So a stage must receive every tensor that an earlier block has returned and
that its own blocks, later ones or the head use, directly or through code between the blocks. What a block leaves
for another in any other way (an attribute, a closure, a list, a parameter) would stay on its rank, so it is refused.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.attention import SeqInfo
from models.decoder import Decoder
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import (
    TorchDispatchMode,
    schema,
    storage_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    with_children,
)
from titanlite.registry.family import Family, location_of

_BETWEEN = -1  # in the place of a call's number: code of `Model.forward` between the calls
_VALUES = (type(None), bool, int, float, str)  # beside tensors, what a block may return
_REMEDY = "a block must take it as an argument, and return it if another one uses it"


class NotCarried(UserError):
    """A stage would not have what a block uses."""


@dataclass(frozen=True)
class Slot:
    """The placeholder of a tensor: its number."""

    number: int


class ModuleCall(NamedTuple):
    """A call of the embedding, a block or the head."""

    name: str  # "embed", "layers.3", "head"
    result: Any  # what it returned, with a Slot for each tensor
    reads: set[int]  # the tensors of earlier calls that it uses
    operations: list[str]  # PyTorch's, with the shapes of their arguments


class Flow(NamedTuple):
    """The calls of a forward pass, and the tensors that they return, by number."""

    calls: list[ModuleCall]  # the last one is the head's
    tensors: list[Tensor]  # on the meta device; what counts are shape, dtype and requires_grad
    makers: list[int]  # the call that returned each
    hidden: Tensor = torch.empty(0, device="meta")  # what the head reads

    def crossing(self, call: int) -> list[int]:
        """The tensors from before a call that it, or a later one, uses."""
        read = set().union(*(each.reads for each in self.calls[call:]))
        return sorted(number for number in read if self.makers[number] < call)

    def calls_of(self, names: set[str]) -> range:
        """The numbers of the calls of these; they are consecutive."""
        numbers = [number for number, call in enumerate(self.calls) if call.name in names]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    def example(self, value: Any) -> Any:
        """The tensor of a Slot, on the meta device, and other values as they are."""
        return self.tensors[value.number] if isinstance(value, Slot) else value


Run = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]


class _Proxy:
    """A proxy of an embedding or a block: its attributes are the module's, and a call goes to `run`."""

    def __init__(self, name: str, module: Any, run: Run):
        vars(self).update(_name=name, _module=module, _run=run)

    @property  # type: ignore[misc]  # mypy takes it for an attribute that is not to change
    def __class__(self) -> Any:
        """For isinstance in a fork's forward."""
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._name, self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def through(model: Decoder, run: Run) -> Decoder:
    """The same model, in whose forward pass each call of the embedding or a block is `run(name, module, args, kwargs)`."""
    view: Any = copy.copy(model)
    layers = {name: _Proxy(f"layers.{name}", block, run) for name, block in model.layers.items()}
    with_children(view, model, {"embed": _Proxy("embed", model.embed, run), "layers": layers})
    return view


# ------------------------------------------------------------------------------------------------------------------ the trace


def trace(model: Decoder, batch: int = 1, seq_len: int = 16, alone: str = "", whole: Flow | None = None) -> Flow:
    """The flow of a forward pass. model: on the meta device. Raises NotCarried, and what the model's code raises.

    A head that is split over ranks is not run, because its collectives need memory. alone: the one block that is run; others
    return what they did in `whole`.
    """
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64, device="meta")
    tracer, head = _Tracer(model, alone, whole), model.head
    assert head is not None
    split = any(isinstance(parameter, DTensor) for parameter in head.parameters())
    tracer.makers[storage_of(tokens)] = _BETWEEN
    with tracer:
        hidden = through(model, tracer.run)(tokens, SeqInfo(tokens))
        tracer.run("head", nn.Flatten() if split else head, (hidden,) if split else (hidden, tokens), {})
    return tracer.flow._replace(hidden=torch.empty_like(hidden))


class _Tracer(TorchDispatchMode):
    """Follows each tensor, by its storage, from the call that has made it to those that use it."""

    def __init__(self, model: Decoder, alone: str, whole: Flow | None):
        super().__init__()
        self.flow, self.alone, self.whole = Flow([], [], []), alone, whole
        self.order = ["embed", *(f"layers.{name}" for name in model.layers), "head"]
        self.owned = {storage_of(each): name for name, each in itertools.chain(model.named_parameters(), model.named_buffers())}
        self.makers: dict[int, int] = {}  # storage -> the call that has made it; _BETWEEN once it was returned
        self.depends: dict[int, set[int]] = {}  # storage -> the numbers that its values depend on
        self.returned: set[int] = set()  # storages of what calls have returned
        self.objects = {id(each): number for number, each in enumerate(whole.tensors if whole else ())}  # that calls return
        self.alive: list[Any] = []  # so that no storage and no id is used again
        self._begin(_BETWEEN, "code between the blocks", ())

    def _begin(self, number: int, name: str, usable: Iterable[Tensor]) -> None:
        self.number, self.call = number, ModuleCall(name, None, set(), [])
        self.usable = {storage_of(tensor) for tensor in usable}  # arguments, parameters and buffers

    def run(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a block and notes what it uses and returns."""
        calls, number = self.flow.calls, len(self.flow.calls)
        if self.whole is not None and name != self.alone:
            calls.append(self.whole.calls[number])
            return tree_map(self.whole.example, calls[-1].result)
        if calls and self.order.index(name) < self.order.index(calls[-1].name):
            raise NotCarried(f"{name} runs again after {calls[-1].name}; a block may run several times in a row only")
        own = [*module.parameters(), *module.buffers()]
        for owner in (self.owned.get(storage_of(each), f"{name}.") for each in own):
            if not owner.startswith(f"{name}.") and (name, owner) != ("head", "embed.weight"):  # whose gradients are added
                raise NotCarried(f"{name} shares {owner}, which several ranks would train apart: give each part its own")
        # Copies, so that a tensor which the block finds in another way is not among its arguments.
        args, kwargs = tree_map(self._copied, (args, kwargs))
        before, structure = tree_flatten((args, kwargs))
        self._begin(number, name, [*own, *(each for each in before if isinstance(each, Tensor))])
        result = module(*args, **kwargs)
        self._log("returns")
        after, structure_after = tree_flatten((args, kwargs))
        if structure != structure_after or any(one is not other for one, other in zip(before, after, strict=True)):
            raise NotCarried(f"{name} changes a list or a dict among its arguments; return what is new")
        self.alive.append(result := tree_map(lambda leaf: leaf if id(leaf) in self.objects else self._copied(leaf), result))
        calls.append(self.call._replace(result=tree_map(self._slot, result)))
        self._begin(_BETWEEN, "code between the blocks", ())
        return result

    def _copied(self, leaf: Any) -> Any:
        """A tensor with a storage of its own, and the number of the one that it is copied from, if a call has returned that."""
        if not isinstance(leaf, Tensor):
            return leaf
        self.alive.append(copied := leaf.clone(memory_format=torch.contiguous_format))  # as messages are
        if id(leaf) in self.objects:
            self.objects[id(copied)] = self.objects[id(leaf)]
        return copied

    def _slot(self, leaf: Any) -> Any:
        """A value that a call returns; a tensor gets a number, unless an earlier call has returned the same one."""
        if not isinstance(leaf, (Tensor, *_VALUES)):
            raise NotCarried(f"{self.call.name} returns a {type(leaf).__name__}; return tensors, in tuples, lists or dicts")
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self.objects:
            return Slot(self.objects[id(leaf)])
        number, storage = len(self.flow.tensors), storage_of(leaf)
        self.flow.tensors.append(torch.empty_like(leaf, requires_grad=leaf.requires_grad))
        self.flow.makers.append(self.number)
        self.makers[storage], self.depends[storage], self.objects[id(leaf)] = _BETWEEN, {number}, number
        self.returned.add(storage)
        return Slot(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        used, written = [each for each in leaves if isinstance(each, Tensor)], _written(func, args, kwargs)
        if func is not torch.ops.aten.detach.default:  # autograd's own
            shapes = [(*each.shape, each.dtype) if isinstance(each, Tensor) else each for each in leaves]
            self._log(f"{func} {shapes}")
        for tensor in used:
            self._use(tensor, any(tensor is each for each in written))
        result = func(*args, **kwargs)
        depends = set().union(*(self.depends.get(storage_of(each), ()) for each in used))
        for tensor in (each for each in [*tree_leaves(result), *written] if isinstance(each, Tensor)):
            self.alive.append(tensor)
            if (storage := storage_of(tensor)) not in self.owned:
                self.makers.setdefault(storage, self.number)
            self.depends[storage] = self.depends.get(storage, set()) | depends
        return result

    def _log(self, operation: str) -> None:
        """Notes what runs; a block that is alone must do what it does in the whole model."""
        done = self.call.operations
        done.append(operation)
        known = self.whole.calls[self.number].operations if self.whole is not None and self.number != _BETWEEN else done
        if known[len(done) - 1 : len(done)] != done[-1:]:
            raise NotCarried(f"{self.call.name} computes something else without what earlier blocks leave in Python: {_REMEDY}")

    def _use(self, tensor: Tensor, written: bool) -> None:
        """Raises NotCarried unless what runs may use this tensor."""
        storage, name = storage_of(tensor), self.call.name
        maker, owner = self.makers.get(storage), self.owned.get(storage)  # None: made before the trace; no parameter or buffer
        if maker == self.number and storage not in self.returned:
            return
        if owner is not None and storage not in self.usable:
            raise NotCarried(f"{name} uses {owner}, which is not its own; register a module where it is used")
        if maker is not None and storage not in self.usable and (maker, self.number) != (_BETWEEN, _BETWEEN):
            raise NotCarried(f"{name} uses a tensor that is none of its arguments: {_REMEDY}")
        if written and owner is None:
            raise NotCarried(f"{name} writes into a tensor that others use, in place; make a new one")
        self.call.reads.update(self.depends.get(storage, ()))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into."""
    arguments = schema(func).arguments
    values = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    into = [values.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in tree_leaves(into) if isinstance(each, Tensor)]


# -------------------------------------------------------------------------------------------------------- what a stage replays


class Replay:
    """The forward pass of a stage: its own calls are made, and those of other stages return what they did elsewhere."""

    def __init__(self, model: Decoder, flow: Flow, calls: range, last: bool):
        """model: whole; of what is removed later, only attributes are read. calls: the stage's own. last: with the head."""
        self.flow, self.calls = flow, calls
        self.received, self.sent = flow.crossing(calls.start), [] if last else flow.crossing(calls.stop)
        self.model, self.view = model, through(model, self._run)
        self.number = 0  # of the next call
        self.values: dict[int, Tensor] = {}

    def interface(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What it takes and what it returns, on the meta device."""
        takes, gives = ([self.flow.tensors[number] for number in numbers] for numbers in (self.received, self.sent))
        return tuple(takes), tuple(gives) or (self.flow.hidden,)

    def __call__(self, received: tuple[Tensor, ...], tokens: Tensor, seq: SeqInfo) -> Tensor | tuple[Tensor, ...]:
        """What later stages need, or on the last stage hidden states (batch, seq, dim). received: from earlier stages."""
        self.number, self.device, self.view.training = 0, tokens.device, self.model.training
        self.values = dict(zip(self.received, received, strict=False))  # the first stage ignores an argument
        hidden = self.view(tokens, seq)
        values, self.values = self.values, {}
        return tuple(values[number].contiguous() for number in self.sent) or hidden

    def _run(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self.number = self.number, self.number + 1
        call = self.flow.calls[number]
        if call.name != name:
            raise NotCarried(f"forward calls {name}, and called {call.name} when it was traced: it depends on data")
        if number not in self.calls:
            return tree_map(self._elsewhere, call.result)
        result = module(*args, **kwargs)
        for slot, leaf in zip(tree_leaves(call.result), tree_leaves(result), strict=True):
            if isinstance(slot, Slot):
                self.values.setdefault(slot.number, leaf)
                slot, leaf = ((*each.shape, each.dtype) for each in (self.flow.tensors[slot.number], leaf))
            if slot != leaf:
                raise NotCarried(f"{name} returns {leaf}, and returned {slot} when it was traced: it depends on data")
        return result

    def _elsewhere(self, value: Any) -> Any:
        """What a call of another stage has returned, if it is used here; else zeros without memory."""
        if not isinstance(value, Slot):
            return value
        if value.number in self.values:
            return self.values[value.number]
        known = self.flow.tensors[value.number]
        return torch.zeros((), dtype=known.dtype, device=self.device).expand(known.shape)


# ------------------------------------------------------------------------------------------------------------------ the check


_KNOWN: dict[tuple[type, str], str] = {}  # for a class of models with these dimensions: `plan` checks many meshes of one model


def not_carried(family: Family) -> str:
    """Why the blocks of a model cannot run on different ranks, with the line of its file; "" if they can."""
    key = family.module.Model, str(family.dimensions())
    if key not in _KNOWN:
        _KNOWN[key] = _not_carried(family)
    return _KNOWN[key]


def _not_carried(family: Family) -> str:
    """After the trace, each block runs alone, the last one first, in a model of its own: what earlier ones have left behind in
    Python is not there. It must do the same operations as in the whole model.
    """
    name = ""
    try:
        whole, model = trace(family.on_meta()), family.on_meta()
        for name in dict.fromkeys(call.name for call in whole.calls[::-1]):
            trace(model, alone=name, whole=whole)
    except NotCarried as error:
        return f"{error} ({location_of(error)})"
    except Exception as error:  # the user's module can raise anything
        cause = f"{(str(error) or repr(error)).splitlines()[0]} ({location_of(error)})"
        if name:
            return f"{name} does not find what earlier blocks leave in Python: {_REMEDY}: {cause}"
        return f"stages need a forward pass that runs without data: {cause}"
    return ""
