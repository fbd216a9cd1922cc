"""Parts of a run that are the user's own code, which a key names as "package.module:name": found, called with their options.

As for a model's module, the user's own configuration or command names what is imported, never a file that a run has written;
and their source code belongs to the run: checkpoints and provenance.json hold it, a resume compares it.
"""

import contextlib
import functools
import inspect
import json
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from titanlite.config.read import allowed, suggest
from titanlite.config.schema import Config, Training
from titanlite.ground.errors import UserError
from titanlite.registry.family import import_named
from titanlite.registry.source import ModelSource, source_of

# The keys that can name a part, each with the table of its options.
KEYS = {
    "lr_scheduler.decay_type": "lr_scheduler.options",
    "training.loss": "training.loss_options",
    "optimizer.name": "optimizer.options",
}


def parts_of(config: Config) -> dict[str, str]:
    """key -> name, of the keys that name a part."""
    values = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in KEYS}
    return {key: name for key, name in values.items() if ":" in name}


def source_of_parts(config: Config) -> ModelSource:
    """The source code of a run's parts: their modules and what these import, as for a model. Raises UserError."""
    found: ModelSource = {}
    for key, name in parts_of(config).items():
        found |= source_of(_module(key, name))
    return found


def check_trust(config: Config, source: Path, named: Collection[str]) -> None:
    """Raises UserError for a part that a file names and the user's command does not, or the other way round.

    named: the parts that the command names.
    """
    parts = parts_of(config)
    for key, name in parts.items():
        if name not in named:
            raise UserError(
                f'{source}: {key} = "{name}": no code that a file names is run; if you trust it, name it yourself: --own {name}'
            )
    if unused := [name for name in named if name not in parts.values()]:
        raise UserError(f"--own {unused[0]}: {source} names no such part; remove the option")


def part_of(key: str, name: str) -> Any:
    """What a key names. Raises UserError that says what is wrong with the module or the name."""
    module, attribute = _module(key, name), name.partition(":")[2]
    if not hasattr(module, attribute):
        offered = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(f'{key} = "{name}": {module.__file__} has no {attribute}{suggest(attribute, offered)}')
    return getattr(module, attribute)


def function_of(key: str, name: str) -> Callable[..., Any]:
    """The function that a key names. Raises UserError that says what is wrong with the module or the name."""
    part = part_of(key, name)
    if isinstance(part, type) or not callable(part):
        raise UserError(f'{key} = "{name}": must be a function, and is {_kind(part)} ({_module(key, name).__file__})')
    return part


def with_options(key: str, name: str, given: Sequence[str], options: dict[str, Any]) -> Callable[..., Any]:
    """The function that a key names, with its options. given: the names of the positional arguments that titanlite passes.

    The signature decides which options there are, and their annotations which values. Raises UserError that lists all faults.
    """
    return bound(key, name, function_of(key, name), given, options)


def bound(
    key: str, name: str, part: Callable[..., Any], given: Sequence[str], options: dict[str, Any], ours: Collection[str] = ()
) -> Callable[..., Any]:
    """A function or class with its options, as `with_options`. ours: arguments that titanlite passes by keyword, from keys of
    the same section that have their names."""
    faults = list(_option_faults(key, name, part, given, options, ours))
    if not faults:
        try:
            inspect.signature(part).bind(*given, **options, **dict.fromkeys(ours))
        except TypeError as error:
            needed = ", ".join([*given, *ours])
            faults.append(f'{key} = "{name}": must take {needed}, then its options by keyword: {error} ({place(part)})')
    if faults:
        raise UserError("\n".join(faults))
    return functools.partial(part, **options)


def _option_faults(
    key: str, name: str, part: Callable[..., Any], given: Sequence[str], options: dict[str, Any], ours: Collection[str]
) -> Iterator[str]:
    """Options that a part does not have, whose values its annotations do not allow, or that are missing."""
    table, parameters = KEYS[key], inspect.signature(part).parameters
    positional = [each for each, parameter in parameters.items() if parameter.kind in _BY_POSITION][: len(given)]
    taken = {*positional, *ours}
    own = {each: parameter for each, parameter in parameters.items() if parameter.kind in _BY_KEYWORD and each not in taken}
    hints, any_name = _hints(part), any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for option, value in options.items():
        if option in ours:
            yield f"{table}.{option}: set {key.split('.')[0]}.{option} instead"
        elif option not in own and not any_name:
            known = suggest(option, list(own), f"{table}.") if own else "; it has none"
            yield f"{table}.{option}: {name} has no such option{known}"
        elif option in hints and (wanted := _unlike(hints[option], value)):
            yield f"{table}.{option} = {value!r}: must be {wanted}"
    for each, parameter in own.items():
        if parameter.default is parameter.empty and each not in options:
            yield f"{table}: has no {each}, which {name} needs"


def _unlike(hint: Any, value: Any) -> str:
    """What an annotation allows, for a value of a TOML file that it does not allow; where it cannot be checked, ""."""
    try:
        TypeAdapter(hint).validate_json(json.dumps(value), strict=True)  # in JSON, and TOML, a list stands for a tuple too
    except ValidationError as error:
        return allowed(list(error.errors()))
    except PydanticUserError:  # an annotation such as torch.Tensor
        pass
    return ""


def token_loss(cfg: Training) -> Callable[..., Any] | None:
    """The loss of each token that `training.loss` names, a `TokenLoss` of interfaces.py; None: the cross entropy.

    Raises UserError as `with_options` does.
    """
    if ":" not in cfg.loss:
        return None
    return with_options("training.loss", cfg.loss, ("logits", "labels"), cfg.loss_options)


def place(part: Callable[..., Any]) -> str:
    """File and line of a function or class."""
    if isinstance(part, type):
        with contextlib.suppress(OSError, TypeError):  # a class whose module says that it is of another one
            return f"{inspect.getsourcefile(part)}, line {inspect.getsourcelines(part)[1]}"
        part = part.__init__  # type: ignore[misc]  # for its line only
    code = getattr(inspect.unwrap(part), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else repr(part)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _module(key: str, name: str) -> Any:
    dotted = name.partition(":")[0]
    return import_named(f'{key} = "{name}"', dotted, "it must be importable from here")


def _kind(part: object) -> str:
    return "a class" if isinstance(part, type) else f"a value of type {type(part).__name__}"


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments of a function or class; none where they name what only a type checker imports."""
    try:
        return typing.get_type_hints(part.__init__ if isinstance(part, type) else part)  # type: ignore[misc]
    except (NameError, TypeError):
        return {}
