"""Finds the user's own code that a key names as "package.module:name", and calls it with its options.

As for a model's module, only the user's own configuration or command names what is imported, never a file that a run has
written. Checkpoints and provenance.json store the source code, and a resume compares it.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from models.head import distilled
from titanlite.config import bounds
from titanlite.config.data import Validation
from titanlite.config.read import SECTIONS, suggest
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, allowed, is_users
from titanlite.registry.family import import_named, location_of
from titanlite.registry.source import ModelSource, source_of
from titanlite.registry.teacher import source_of_teacher

# The keys that can name a part, each with the key of its options.
KEYS = {
    "lr_scheduler.decay_type": "lr_scheduler.options",
    "training.loss": "training.loss_options",
    "training.dataset": "training.dataset_options",
    "validation.dataset": "validation.dataset_options",
    "optimizer.name": "optimizer.options",
}


NAMING = {*KEYS, "training.sources", "hooks.modules", "distillation.teacher"}  # the keys that name parts of the training


def parts_of(config: Config) -> dict[str, str]:
    """{key: name} of the keys that name a part."""
    values = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in KEYS}
    for section in ("training", "validation"):
        sources = enumerate(getattr(config, section).sources, 1)
        values |= {f"{section}.sources, entry {number}: path": source.path for number, source in sources}
    hooks = {f"hooks.modules, entry {number}": name for number, name in enumerate(config.hooks.modules, 1)}
    return {key: name for key, name in values.items() if is_part(name)} | hooks


def without_reports(config: Config) -> Config:
    """The configuration without validation and metrics of the user's own: they report, and change no step."""
    metrics = config.metrics.model_copy(update={"extra": [], "extra_options": {}})
    return config.model_copy(update={"metrics": metrics, "validation": Validation()})


def is_part(name: str) -> bool:
    """Whether a name is that of a part, not a path or a dataset of the Hugging Face hub ("hub:...")."""
    return bounds.PART.fullmatch(name) is not None and not name.startswith("hub:")


def source_of_parts(config: Config, reports: bool = False) -> ModelSource:
    """The source code of a run's parts: their modules and what these import, as for a model, and the teacher's family. Raises
    UserError.

    reports: include those that `without_reports` removes, which a resume may change.
    """
    config, found = config if reports else without_reports(config), dict[str, dict[str, str]]()
    for key, name in [*parts_of(config).items(), *(("metrics.extra", name) for name in config.metrics.extra)]:
        found |= source_of(_module(key, name))
    return found | (source_of_teacher(config.distillation.teacher) if config.distillation.teacher else {})


def part_of(key: str, name: str) -> Any:
    """The object that a key names. Raises UserError that says what is wrong with the module or the name."""
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

    given: the names of the arguments that titanlite passes by position; ours: of those that it passes by keyword. table: the
    key of the options; by default that of KEYS.

    The signature decides which options exist, its annotations which values they take. Raises UserError that lists all faults.
    """
    part, table = function_of(key, name, classes), table or KEYS.get(key, key.replace(": path", ": options"))
    if faults := list(_option_faults(name, part, given, options, ours, table)):
        raise UserError("\n".join(faults))
    try:
        inspect.signature(part).bind(*given, **options, **dict.fromkeys(ours))
    except TypeError as error:  # also for an option that is missing
        takes = [", ".join([*given, *ours]), f"{table} by keyword"]  # data takes nothing but options
        raise fault_of(key, name, f"must take {', then '.join(filter(None, takes))}: {error}") from None
    return functools.partial(part, **options)


def _option_faults(
    name: str, part: Callable[..., Any], given: Sequence[str], options: dict[str, Any], ours: Collection[str], table: str
) -> Iterator[str]:
    """A fault for each option that is unknown, or has a value that its annotation does not allow."""
    section, parameters = table.partition(".")[0], inspect.signature(part).parameters
    own = [each for each in [*parameters][len(given) :] if each not in ours]
    hints, any_name = _hints(part), any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for option, value in options.items():
        if option in ours and option in SECTIONS[section].model_fields:
            yield f"{table}.{option}: set {section}.{option} instead"
        elif option not in own and not any_name:
            yield f"{table}.{option}: {name} has no such option{suggest(option, own, f'{table}.') if own else '; it has none'}"
        elif option in hints and (wanted := _unlike(hints[option], value)):
            yield f"{table}.{option} = {value!r}: must be {wanted}"


def _unlike(hint: Any, value: Any) -> str:
    """What an annotation allows, if it does not allow this value of a TOML file; "" if it does, or cannot be checked."""
    try:
        TypeAdapter(hint).validate_json(json.dumps(value), strict=True)  # as in TOML, a JSON list may be a tuple
    except ValidationError as error:
        return allowed(list(error.errors()))
    except PydanticUserError:  # an annotation such as torch.Tensor
        pass
    return ""


def token_loss(config: Config) -> Callable[..., Any] | None:
    """The loss of each token: that of `training.loss`, a `TokenLoss` of interfaces.py, or that of [distillation]. None: cross
    entropy.

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


def fault_of(key: str, name: str, what: str) -> UserError:
    """A fault of the part that a key names: the message ends with the part's file and line."""
    return UserError(f'{key} = "{name}": {what} ({place(part_of(key, name))})')


def place(part: Callable[..., Any]) -> str:
    """File and line of a function or a class."""
    part = part.func if isinstance(part, functools.partial) else part
    with contextlib.suppress(OSError, TypeError):  # no source code
        return f"{inspect.getsourcefile(inspect.unwrap(part))}, line {inspect.getsourcelines(part)[1]}"
    return repr(part)


@contextlib.contextmanager
def calling(what: str, part: Callable[..., Any] | None = None) -> Iterator[None]:
    """Around the user's code, which can raise anything: raises UserError that begins with `what` and names file and line.

    part: named where the error is in no line of the user's own code.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        where = location_of(error)
        raise UserError(f"{what} ({where if part is None or is_users(where) else place(part)}): {error!r}") from error


def _module(key: str, name: str) -> Any:
    dotted = name.partition(":")[0]
    return import_named(f'{key} = "{name}"', dotted, "it must be importable from here")


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments; none where they use a name that only type checkers import."""
    try:
        parameters = inspect.signature(part, eval_str=True).parameters
    except (NameError, TypeError):
        return {}
    return {name: each.annotation for name, each in parameters.items() if each.annotation is not each.empty}
