"""Finds the user's own code that a key names as "package.module:name", and calls it with its options.

As for a model's module, the user's own configuration or command names what is imported, never a file that a run has written;
and their source code belongs to the run: checkpoints and provenance.json hold it, a resume compares it.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from models.head import distilled
from titanlite.config import bounds
from titanlite.config.read import SECTIONS, suggest
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, allowed
from titanlite.registry.family import import_named
from titanlite.registry.source import ModelSource, source_of

# The keys that can name a part, each with the table of its options.
KEYS = {
    "lr_scheduler.decay_type": "lr_scheduler.options",
    "training.loss": "training.loss_options",
    "training.dataset": "training.dataset_options",
    "validation.dataset": "validation.dataset_options",
    "optimizer.name": "optimizer.options",
}


def parts_of(config: Config) -> dict[str, str]:
    """key -> name, of the keys that name a part."""
    values = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in KEYS}
    for section in ("training", "validation"):
        sources = enumerate(getattr(config, section).sources, 1)
        values |= {f"{section}.sources, entry {number}: path": source.path for number, source in sources}
    hooks = {f"hooks.modules, entry {number}": name for number, name in enumerate(config.hooks.modules, 1)}
    return {key: name for key, name in values.items() if is_part(name)} | hooks


def is_part(name: str) -> bool:
    """Whether a name is that of a part, and no path; "hub:..." stands for a dataset of the Hugging Face hub."""
    return bounds.PART.fullmatch(name) is not None and not name.startswith("hub:")


def source_of_parts(config: Config, metrics: bool = False) -> ModelSource:
    """The source code of a run's parts: their modules and what these import, as for a model. Raises UserError.

    metrics: those of metrics.extra too, which a resume may change.
    """
    extra = [("metrics.extra", name) for name in config.metrics.extra] if metrics else []
    found: ModelSource = {}
    for key, name in [*parts_of(config).items(), *extra]:
        found |= source_of(_module(key, name))
    return found


def check_trust(config: Config, source: Path, named: Collection[str]) -> None:
    """Raises UserError for a part that a file names and the user's command does not, or the other way round.

    named: the parts that the command names.
    """
    parts = parts_of(config)
    for key, name in parts.items():
        if name not in named:
            raise UserError(f'{source}: {key} = "{name}": no code that a file names is run; if you trust it: --own {name}')
    if unused := [name for name in named if name not in parts.values()]:
        raise UserError(f"--own {unused[0]}: {source} names no such part; remove the option")


def part_of(key: str, name: str) -> Any:
    """What a key names. Raises UserError that says what is wrong with the module or the name."""
    module, attribute = _module(key, name), name.partition(":")[2]
    if not hasattr(module, attribute):
        offered = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(f'{key} = "{name}": {module.__file__} has no {attribute}{suggest(attribute, offered)}')
    return getattr(module, attribute)


def function_of(key: str, name: str, classes: bool = False) -> Callable[..., Any]:
    """The function that a key names, or a class where `classes`. Raises UserError that says what is wrong with it."""
    part = part_of(key, name)
    if not callable(part) or (isinstance(part, type) and not classes):
        what, kind = "a class or a function" if classes else "a function", type(part).__name__
        found = "a class" if isinstance(part, type) else f"a value of type {kind}"
        raise UserError(f'{key} = "{name}": must be {what}, and is {found} ({_module(key, name).__file__})')
    return part


def with_options(
    key: str,
    name: str,
    given: Sequence[str],
    options: dict[str, Any],
    ours: Collection[str] = (),
    classes: bool = False,
    table: str = "",
) -> Callable[..., Any]:
    """The function that a key names, or a class where `classes`, with its options.

    given: the names of the arguments that titanlite passes by position; ours: of those by keyword. table: of the options; by
    default that of KEYS.

    The signature decides which options there are, and their annotations which values. Raises UserError that lists all faults.
    """
    part, table = function_of(key, name, classes), table or KEYS.get(key, key.replace(": path", ": options"))
    faults = list(_option_faults(name, part, given, options, ours, table))
    if not faults:
        try:
            inspect.signature(part).bind(*given, **options, **dict.fromkeys(ours))
        except TypeError as error:
            takes = ", ".join([*given, *ours])
            faults.append(f'{key} = "{name}": must take {takes}, then its options by keyword: {error} ({place(part)})')
    if faults:
        raise UserError("\n".join(faults))
    return functools.partial(part, **options)


def _option_faults(
    name: str, part: Callable[..., Any], given: Sequence[str], options: dict[str, Any], ours: Collection[str], table: str
) -> Iterator[str]:
    """Options that a part does not have, whose values its annotations do not allow, or that are missing."""
    section, parameters = table.partition(".")[0], inspect.signature(part).parameters
    passed = {*ours, *[each for each, parameter in parameters.items() if parameter.kind in _BY_POSITION][: len(given)]}
    own = {each: parameter for each, parameter in parameters.items() if parameter.kind in _BY_KEYWORD and each not in passed}
    hints, any_name = _hints(part), any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for option, value in options.items():
        if option in ours and option in SECTIONS[section].model_fields:
            yield f"{table}.{option}: set {section}.{option} instead"
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


def token_loss(config: Config) -> Callable[..., Any] | None:
    """The loss of each token that `training.loss` names, a `TokenLoss` of interfaces.py, or that of [distillation]; None: the
    cross entropy.

    Raises UserError as `with_options` does.
    """
    key, cfg, distillation = "training.loss", config.training, config.distillation
    if ":" not in cfg.loss:
        if not distillation.teacher:
            return None
        return functools.partial(distilled, weight=distillation.weight, temperature=distillation.temperature)
    named = "teacher_logits"
    takes = inspect.signature(function_of(key, cfg.loss)).parameters.get(named)
    if not distillation.teacher and takes is not None and takes.default is takes.empty:
        raise UserError(f'{key} = "{cfg.loss}": takes {named}, so set distillation.teacher')
    return with_options(key, cfg.loss, ("logits", "labels"), cfg.loss_options, (named,) if distillation.teacher else ())


def place(part: Callable[..., Any]) -> str:
    """File and line of a function or a class."""
    part = part.func if isinstance(part, functools.partial) else part
    with contextlib.suppress(OSError, TypeError):  # what has no source
        return f"{inspect.getsourcefile(inspect.unwrap(part))}, line {inspect.getsourcelines(part)[1]}"
    return repr(part)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _module(key: str, name: str) -> Any:
    dotted = name.partition(":")[0]
    return import_named(f'{key} = "{name}"', dotted, "it must be importable from here")


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments; none where they name what only a type checker imports."""
    try:
        parameters = inspect.signature(part, eval_str=True).parameters
    except (NameError, TypeError):
        return {}
    return {name: each.annotation for name, each in parameters.items() if each.annotation is not each.empty}
