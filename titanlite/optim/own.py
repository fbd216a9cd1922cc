"""An optimizer of the user's own, `optimizer.name = "package.module:Class"`: its check before a start, and its state.

Its first step makes its state. Where a checkpoint is read before that, a second instance makes tensors of the same shapes from
a copy of each parameter, so that the run's own state is not one step ahead.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableSequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Optimizer
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import like
from titanlite.registry import own
from titanlite.transforms.shards import local_part

KEY = "optimizer.name"
Groups = list[dict[str, Any]]  # as of torch.optim, with pairs (name, parameter)
Build = Callable[[Groups], torch.optim.Optimizer]


def is_own(cfg: Optimizer) -> bool:
    """Whether the optimizer is a class of the user's own, or of any other package."""
    return ":" in cfg.name


def build_own(groups: Groups, cfg: Optimizer, ranks: dist.ProcessGroup | None = None) -> torch.optim.Optimizer:
    """The class that `cfg.name` names, for these groups; `make_state` completes its state. ranks: those with the same layers.

    Raises UserError for state that does not follow the shards of this mesh.
    """
    build = _constructor(cfg, ranks)
    optimizer = build(groups)
    optimizer.defaults["fused"] = False  # it takes no found_inf; the groups have their own copy of the value
    kept: dict[Tensor, set[str]] = {}  # the names of each parameter's state before a step

    def before(*_: Any) -> None:
        _reach_all(optimizer)
        kept.update({p: {*state} for p, state in optimizer.state.items() if state})

    def after(*_: Any) -> None:
        if late := {name for p, names in kept.items() for name in names ^ {*optimizer.state[p]}}:
            what = f"makes or removes state[{sorted(late)[0]!r}] after its first step"
            raise UserError(f"{_title(cfg)}: {what}, so that no resume could read its checkpoints: make all state in the first")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.titanlite_build = build  # type: ignore[attr-defined]  # for `make_state`
    every = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    one_of_a_layout = {(p.shape, str(getattr(p, "placements", ""))): (group, p) for group, p in every}
    for group, p in one_of_a_layout.values():
        if found := list(_state_faults(p, _state_of(build, group, p))):
            raise UserError("\n".join(f"{_title(cfg)}: {fault}" for fault in found))
    return optimizer


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives an own optimizer state for each parameter that has none yet; for its values, which are of one step, others are
    loaded."""
    for group in optimizer.param_groups if hasattr(optimizer, "titanlite_build") else []:
        for p in group["params"]:
            if not optimizer.state.get(p):
                optimizer.state[p] = _state_of(optimizer.titanlite_build, group, p)  # type: ignore[attr-defined]


@torch.no_grad()
def make_again(optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Makes this state of an own optimizer again, from the weights that were loaded since.

    trained: the optimizer's parameters by name. names: of tensors in checkpoints.
    """
    name_of = {p: name for name, p in trained.items()}
    for group in optimizer.param_groups if hasattr(optimizer, "titanlite_build") else []:
        for p in group["params"]:
            if keys := [key for key in optimizer.state[p] if f"optimizer.{name_of[p]}.{key}" in names]:
                made = _state_of(optimizer.titanlite_build, group, p)  # type: ignore[attr-defined]
                for key in keys:
                    optimizer.state[p][key].copy_(made[key])


def sharded(value: Tensor, parameter: Tensor) -> Tensor:
    """State as checkpoints store it: what was made for a shard alone becomes a DTensor that shares its memory."""
    if isinstance(value, DTensor) or not value.ndim or not isinstance(parameter, DTensor):
        return value
    return like(parameter, value)


def state_bytes(name: str, parameter: Tensor, cfg: Optimizer) -> int:
    """Bytes of state per value of a parameter, which may be on the meta device."""
    state = _state_of(_constructor(cfg), {}, _stand_in(parameter), name)
    return sum(value.element_size() for value in state.values() if value.ndim)


def _constructor(cfg: Optimizer, ranks: dist.ProcessGroup | None = None) -> Build:
    """The class with its options. Raises UserError that lists all faults."""
    kind = own.part_of(KEY, cfg.name)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise UserError(f"{_title(cfg)}: must be a class derived from torch.optim.Optimizer")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise UserError(f"{_title(cfg)}: its step needs a closure, which computes the loss again")
    takes = inspect.signature(kind).parameters
    if_taken = {"weight_decay": cfg.weight_decay, "group": ranks}
    ours = {"lr": cfg.lr} | {name: value for name, value in if_taken.items() if name in takes}
    build = own.with_options(KEY, cfg.name, ("params",), cfg.options, ours, classes=True)

    def with_groups(groups: Groups) -> torch.optim.Optimizer:
        taken = [{key: value for key, value in group.items() if key in ours or key != "weight_decay"} for group in groups]
        return build(taken, **ours)

    return with_groups


def _reach_all(optimizer: torch.optim.Optimizer) -> None:
    """Sets zero gradients where there are none: so the first step makes all state, and every checkpoint has it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)


def _state_of(build: Build, group: dict[str, Any], parameter: Tensor, name: str = "parameter") -> dict[str, Tensor]:
    """The state that one step with zero gradients and a rate of 0 makes, for a copy of a parameter."""
    copy = nn.Parameter(parameter.detach().clone())
    copy.grad = torch.zeros_like(copy)
    rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    optimizer = build([{**rest, "params": [(name, copy)], "lr": 0.0}])
    optimizer.step()
    return optimizer.state[copy]


def _title(cfg: Optimizer) -> str:
    return f'{KEY} = "{cfg.name}" ({own.place(own.part_of(KEY, cfg.name))})'


# ------------------------------------------------------------------------------------------------------------------ the check


def faults(groups: Groups, cfg: Optimizer) -> Iterator[str]:
    """A class whose results a run would not keep. It takes three steps with small tensors of as many dimensions as the model's
    parameters have, which may be on the meta device. Raises UserError where it cannot be built, or a step fails."""
    build = _constructor(cfg)
    title, small = _title(cfg), [{**group, "params": _one_of_each_ndim(group["params"])} for group in groups]
    with own.calling(f"{title}: fails"):
        optimizer = build(small)
        for key in ("lr", "weight_decay"):
            found = [group[key] if key in optimizer.defaults else 0.0 for group in optimizer.param_groups]
            if found != [group.get(key, cfg.lr) for group in groups]:
                remedy = "; set it to 0, also in optimizer.groups" if key == "weight_decay" else ""
                yield f"{title}: has no {key} among its defaults, so optimizer.{key} would be ignored{remedy}"
                return
        yield from (f"{title}: {fault}" for fault in _of_steps(optimizer))


def _of_steps(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What three steps show: with zero gradients, with others, and with a rate of 0."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    draw, hidden, known = torch.Generator().manual_seed(0), _hidden(optimizer), _known(optimizer, every)
    for size in (0.0, 1.0):
        for p in every:
            p.grad = torch.randn(p.shape, generator=draw) * size
        optimizer.step()
        if not all(p.isfinite().all() for p in every):
            yield f"gives NaN or infinity for {'zero' if size == 0 else 'normally distributed'} gradients"
            return
    yield from next(filter(None, (list(_state_faults(p, optimizer.state[p])) for p in every)), [])
    known += _known(optimizer, every)  # the tensors themselves, so that no other one has their memory
    if changed := _changed(hidden, _hidden(optimizer), {_storage(value) for value in known}):
        yield f"changes {', '.join(changed)} in its step, which no checkpoint holds; keep it in self.state[parameter]"
    if others := [key for key in optimizer.state if all(key is not p for p in every)]:
        yield f"has state for {others[0]!r}, which is no parameter; checkpoints hold the state of parameters"
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in every]
    optimizer.step()
    if any(not torch.equal(p, old) for p, old in zip(every, before, strict=True)):
        yield 'changes parameters with group["lr"] = 0, so the schedule would be ignored'


def _one_of_each_ndim(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, nn.Parameter]]:
    return list({p.ndim: (name, nn.Parameter(_stand_in(p))) for name, p in pairs}.values())


def _stand_in(parameter: Tensor) -> Tensor:
    """A tensor with as many dimensions, and at most a few values in each."""
    return torch.ones([min(size, 2 + number) for number, size in enumerate(parameter.shape)], dtype=parameter.dtype)


def _known(optimizer: torch.optim.Optimizer, every: list[Tensor]) -> list[Tensor]:
    """Tensors that an optimizer may have lists of: parameters, gradients, state."""
    state = [value for p in every for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor)]
    return [*(p.detach() for p in every), *(p.grad for p in every if p.grad is not None), *state]


_Leaf = tuple[int | None, str]  # the storage of a tensor, None of a number; its value


def _hidden(optimizer: torch.optim.Optimizer) -> dict[str, list[_Leaf]]:
    """The numbers and tensors that an optimizer keeps outside of its state, also in lists and dicts."""
    found = {f"self.{key}": value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    for group in optimizer.param_groups:
        found |= {f'group["{key}"]': value for key, value in group.items() if key != "params"}
    return {name: [*_leaves(value)] for name, value in found.items()}


def _leaves(value: Any) -> Iterator[_Leaf]:
    if isinstance(value, (MutableSequence, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    elif isinstance(value, (int, float, Tensor)):
        yield _storage(value) if isinstance(value, Tensor) else None, repr(value)


def _changed(before: dict[str, list[_Leaf]], now: dict[str, list[_Leaf]], known: set[int]) -> list[str]:
    """The names whose numbers or tensors differ, those with known storages apart."""

    def own_values(leaves: list[_Leaf]) -> list[str]:
        return [value for storage, value in leaves if storage not in known]

    return [name for name, leaves in now.items() if own_values(leaves) != own_values(before.get(name, []))]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state_faults(parameter: Tensor, state: dict[str, Any]) -> Iterator[str]:
    """State of a parameter that a checkpoint cannot hold, or another mesh not split."""
    followed = tuple(local_part(parameter).shape)
    for key, value in state.items():
        what = f'state["{key}"] of a parameter of shape {tuple(parameter.shape)}'
        if not isinstance(value, Tensor):
            yield f"{what} is {value!r}; checkpoints hold tensors: make it one, such as torch.zeros(())"
        elif isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
            yield f"{what} is a sum of which each rank has a part; redistribute it"
        elif value.ndim and tuple(local_part(value).shape) != followed:
            yield f"{what} has local shape {tuple(local_part(value).shape)}; must be 0-d, or the parameter's {followed}"
