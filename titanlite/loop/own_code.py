"""Code of the user's own beside the training loop: numbers for reports (`metrics.extra`) and hooks (`hooks.modules`).

Every rank calls all of it at the same points, so it may use collectives.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.distributed.tensor import DTensor

from models.decoder import Decoder
from titanlite.config.operation import Metrics
from titanlite.config.read import suggest
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import gradient_hooks
from titanlite.interfaces import Hooks
from titanlite.launch.process import of_all_ranks
from titanlite.loop.loss import to_microbatch
from titanlite.optim.adam_bf16 import clear_remainders_of_zeros
from titanlite.optim.state import refuse_unfrozen
from titanlite.registry.family import import_named
from titanlite.registry.own import calling, place, with_options
from titanlite.transforms import float8

EXTRA, HOOKS = "metrics.extra", "hooks.modules"
# The hooks of a module, each with the arguments that titanlite passes.
_ARGUMENTS = {name: [*inspect.signature(hook).parameters][1:] for name, hook in vars(Hooks).items() if name[0] != "_"}
Pair = tuple[float, float]  # a sum, and the number of its terms
_PAIRS = TypeAdapter(dict[str, Pair], config={"strict": True})


class Part(NamedTuple):
    """A function of the user's own."""

    source: str  # its key and name, for messages
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        with calling(f"{self.source}: fails"):
            return self.function(*arguments)

    def numbers(self, *arguments: Any) -> dict[str, Pair]:
        """What it returns; each number is the pair (number, 1)."""
        returned = self(*arguments)
        found = {} if returned is None else returned
        try:
            pairs = {name: value if isinstance(value, tuple) else (value, 1) for name, value in found.items()}
            return _PAIRS.validate_python(pairs)
        except (AttributeError, ValidationError):
            what = "a dict from names to numbers, or to pairs of a sum and a number"
            raise UserError(f"{self.source}: returns {returned!r}; must be {what} ({place(self.function)})") from None


class OwnCode:
    """The metrics and hooks of a run. Raises UserError where one does not follow titanlite/interfaces.py.

    metrics: False where nothing is reported; their modules are then not imported.
    """

    def __init__(self, config: Config, metrics: bool = True):
        self._metrics = _metrics_of(config.metrics) if metrics else []
        self._hooks = [(name, part) for module in config.hooks.modules for name, part in _hooks_of(module).items()]

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls the hooks of this name, in the order of their modules."""
        for name, part in self._hooks:
            if name == hook:
                part(*arguments)

    def after_building(self, model: nn.Module, config: Config, optimizer: torch.optim.Optimizer) -> None:
        """Calls these hooks, which may change weights, freeze parameters and run the model. Raises UserError where they
        unfreeze others, or register hooks that FSDP2 does not call."""
        from titanlite.parallel.fsdp import begin, release  # not at the top: a check needs no FSDP

        begin(model)
        self.call("after_building", model, config)
        release(model)
        if any(name == "after_building" for name, _ in self._hooks):
            clear_remainders_of_zeros(optimizer)
        refuse_unfrozen(optimizer, model)
        _refuse_gradient_hooks(model)

    def at_step(self, hook: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Calls "before_step" or "after_step", which may change weights too; what follows from them then follows from these."""
        from titanlite.parallel.fsdp import release

        if any(name == hook for name, _ in self._hooks):
            self.call(hook, step, model, optimizer)
            release(model)
            float8.measure_weights(model)
            clear_remainders_of_zeros(optimizer)
            refuse_unfrozen(optimizer, model)
            _refuse_gradient_hooks(model)

    def values(self, step: int, values: dict[str, Any], model: Decoder, batch: Batch) -> dict[str, float | None]:
        """What metrics and then `at_report` add to a report, as "extra/NAME"; all ranks together.

        Sums and numbers are added over the ranks that return a name: so a mean over tokens or over values is that of the whole
        batch or model on every mesh. Each hook gets what was added before it: it may send all of a report elsewhere.
        """
        added: dict[str, float | None] = {}
        if self._metrics:
            from titanlite.parallel.fsdp import evaluating  # not at the top: a check needs no FSDP

            with evaluating(model):
                microbatches = [to_microbatch(model, each) for each in batch.microbatches()]
                found = [(part, part.numbers(model, microbatches)) for part in self._metrics]
            added = _over_ranks(found, ())
        for part in [part for name, part in self._hooks if name == "at_report"]:
            added |= _over_ranks([(part, part.numbers(step, values | added))], added)
        return added


def _refuse_gradient_hooks(model: nn.Module) -> None:
    """Raises UserError for `Tensor.register_hook` on sharded parameters; FSDP2 sets their gradients without a graph."""
    for name, parameter in model.named_parameters():
        for hook in gradient_hooks(parameter) if isinstance(parameter, DTensor) else ():
            raise UserError(
                f"{HOOKS}: {name}.register_hook({getattr(hook, '__qualname__', hook)}) has no effect, since {name} is sharded; "
                "use register_post_accumulate_grad_hook, which gets the parameter with the sum of its gradients so far, or "
                f"[[optimizer.groups]] to train it at another rate ({place(hook)})"
            )


def _over_ranks(found: list[tuple[Part, dict[str, Pair]]], known: Iterable[str]) -> dict[str, float | None]:
    """The numbers of a report from what these parts have returned on each rank. known: names that it has already."""
    mine: dict[str, Pair] = {}
    for part, pairs in found:
        named = {f"extra/{name}": pair for name, pair in pairs.items()}
        if twice := sorted(named.keys() & {*mine, *known}):
            name = twice[0].removeprefix("extra/")
            raise UserError(f'{part.source}: returns "{name}", as another function does; rename one')
        mine |= named
    totals: dict[str, Pair] = {}
    for name, (total, count) in [each for pairs in of_all_ranks(mine) for each in pairs.items()]:
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + total, before[1] + count
    return {name: total / count if count else None for name, (total, count) in totals.items()}


def _metrics_of(cfg: Metrics) -> list[Part]:
    """The functions of metrics.extra, with their options."""
    names = [name.partition(":")[2] for name in cfg.extra]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f'{EXTRA}: two functions have the name "{twice[0]}"; rename one')
    if unknown := [name for name in cfg.extra_options if name not in names]:
        raise UserError(f"{EXTRA}_options.{unknown[0]}: {EXTRA} has no such function{suggest(unknown[0], names)}")
    found = []
    for name, short in zip(cfg.extra, names, strict=True):
        options, table = cfg.extra_options.get(short, {}), f"{EXTRA}_options.{short}"
        found.append(Part(f'{EXTRA} = "{name}"', with_options(EXTRA, name, ("model", "microbatches"), options, table=table)))
    return found


def _hooks_of(name: str) -> dict[str, Part]:
    """The hooks of a module, by name. Raises UserError for a module without hooks, or with an unknown one."""
    key = f'{HOOKS} = "{name}"'
    module = import_named(key, name, "it must be importable from here")
    known = ", ".join(_ARGUMENTS)
    for each, part in vars(module).items():
        written_here = inspect.isfunction(part) and part.__module__ == module.__name__
        if written_here and each.startswith(("before_", "after_", "at_")) and each not in _ARGUMENTS:
            raise UserError(f"{key}: {each} is no hook{suggest(each, list(_ARGUMENTS))}; hooks are {known} ({place(part)})")
    hooks = {each: Part(f"{key}: {each}", part) for each in _ARGUMENTS if callable(part := vars(module).get(each))}
    if not hooks:
        raise UserError(f"{key}: has none of the functions {known} ({module.__file__})")
    for each, part in hooks.items():
        try:
            inspect.signature(part.function).bind(*_ARGUMENTS[each])
        except TypeError as error:
            takes = ", ".join(_ARGUMENTS[each])
            raise UserError(f"{part.source} must take {takes}: {error} ({place(part.function)})") from None
    return hooks


def faults(config: Config) -> None:
    """Raises UserError for metrics and hooks that do not follow titanlite/interfaces.py."""
    OwnCode(config)
