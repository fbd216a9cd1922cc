"""`[model] name` and `flavor` -> the module that defines the model, and its dimensions. The folder models/ is the registry."""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

import models
from models.decoder import Decoder, Limits
from titanlite.config.read import suggest
from titanlite.config.schema import Config, Model
from titanlite.ground.errors import UserError, is_users
from titanlite.registry.description import Description, read_description, unused_keys
from titanlite.registry.overrides import overridden

OFFERS = ("Config", "FLAVORS", "Model", "sharding", "initial", "flops")
OFFERS_HF = ("HF", "HF_TYPES", "from_hf", "to_hf")  # also offered by a family that supports Hugging Face's format
_FOLDER = os.path.dirname(models.__file__)
FROM_ASSETS = "hf"  # the flavor with the dimensions of model.hf_assets_path


class _NoInitialization(TorchFunctionMode):
    """Skips torch.nn.init, which has no effect on the meta device, but imports dynamo there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class Family(NamedTuple):
    """A model module and one of its flavors."""

    module: ModuleType
    config: Any  # the module's own Config

    def build(self) -> Any:  # a Decoder that has its embedding and head
        """The model with its parameters tied, on the current device, before their initial values."""
        model = self.module.Model(self.config)
        getattr(model, "tie_weights", lambda: None)()  # a constructor need not call it
        return model

    def on_meta(self) -> Decoder:
        """The model without memory: every parameter on the meta device, in float32."""
        with torch.device("meta"), _NoInitialization():
            model = self.build()
        model.limits, model.lr_scale = self.limits, self.scale("lr_scale")
        return model

    @property
    def limits(self) -> Limits:
        """What the family's file declares in LIMITS."""
        return limits_of(self.module)

    def scale(self, name: str) -> dict[str, float]:
        """The optional table `lr_scale` or `init_scale` of the family's file: {pattern of parameter names: factor}."""
        return getattr(self.module, name)(self.config) if hasattr(self.module, name) else {}

    def dimensions(self) -> dict[str, Any]:
        """The fields of `config`, after a round trip through JSON. Raises UserError for a value that other processes cannot
        compare: checkpoints keep these, and nodes agree on them."""
        found = json.loads(json.dumps(dataclasses.asdict(self.config), default=_text))
        if changing := [f"Config.{name} = {value!r}" for name, value in found.items() if " at 0x" in str(value)]:
            remedy = "an address differs in each process; use a function or a class, or give the value's class a __repr__"
            raise UserError(f"{type(self.config).__module__}: {', '.join(changing)}: {remedy}")
        return found

    def to_hf(self) -> dict[str, Any]:
        """The config.json of these dimensions, which `described` reads. Raises UserError where that has no words for them."""
        require_hf(self.module)
        try:
            return self.module.to_hf(self.config)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self.module.__name__}: no config.json describes these dimensions: {error}") from None

    def changes_since(self, before: dict[str, Any]) -> list[str]:
        """A sentence for each dimension in `before` that has changed; a new dimension does not count."""
        now = self.dimensions()
        return [f"{name} = {self.shown(name)}, was {was!r}" for name, was in before.items() if now.get(name) != was]

    def shown(self, name: str) -> str:
        """A dimension in a message; a RoPE scaling has its type and the names of its numbers."""
        value = getattr(self.config, name, None)
        return repr(value if hasattr(value, "_fields") else self.dimensions().get(name))


def _text(value: Any) -> str:
    """The repr of a value, without the address of a function and the order of a set of texts, which differ in each process."""
    if isinstance(value, set | frozenset) and not all(isinstance(each, int | float) for each in value):
        inside = ", ".join(sorted(map(_text, value), key=lambda text: (len(text), text)))
        return f"frozenset({{{inside}}})" if isinstance(value, frozenset) else f"{{{inside}}}"
    named = " at 0x" in repr(value) and (inspect.isfunction(value) or inspect.isbuiltin(value))
    return f"{value.__module__}.{value.__qualname__}" if named else repr(value)


class BrokenModule(UserError):
    """The module exists, but its contents are wrong."""


def load_family(name: str, flavor: str, assets: str = "", overrides: dict[str, Any] | None = None) -> Family:
    """The family `models.<name>`, or any importable module for a dotted name, with its flavor in upper or lower case.

    assets: model.hf_assets_path, whose config.json has the dimensions of the flavor "hf". overrides: model.overrides. Raises
    UserError where there is no such module, where it lacks a part of the interface, or has no such flavor or dimension.
    """
    module = load_module(name)
    config = _config_of(module, name, flavor, assets)
    return Family(module, overridden(config, overrides or {}, [*module.FLAVORS.values(), config], name))


def flavor_of(module: ModuleType, given: str) -> str:
    """The flavor that is meant, such as "8b" by "8B", as torchtitan writes it; `given` if there is none."""
    return given if given in module.FLAVORS else next((each for each in module.FLAVORS if each.lower() == given.lower()), given)


def _config_of(module: ModuleType, name: str, flavor: str, assets: str) -> Any:
    """The dimensions of a flavor."""
    if flavor == FROM_ASSETS:
        if not assets:
            raise UserError(f'model.flavor = "{FROM_ASSETS}": takes its dimensions from model.hf_assets_path, which is empty')
        return described(module, read_description(Path(assets)))
    if (flavor := flavor_of(module, flavor)) not in module.FLAVORS:
        have = ", ".join(module.FLAVORS) or "(none)"
        raise UserError(f'model.flavor = {flavor!r}: {name} has the flavors {have}; "{FROM_ASSETS}": as model.hf_assets_path')
    return module.FLAVORS[flavor]


def family_of(keys: Model) -> Family:
    """The family, flavor and overrides that [model] names. Raises UserError as `load_family` does."""
    return load_family(keys.name, keys.flavor, keys.hf_assets_path, keys.overrides)


def stored_family(keys: Model, folder: str, option: str) -> Family:
    """The family that the [model] of a checkpoint names, where model.hf_assets_path may have moved since.

    folder: what the user gives as `option`, or "". Where the path is gone, it is the new one, whose config.json has the
    dimensions of the flavor "hf". Raises UserError, also where the path is gone and no folder is given.
    """
    stored = keys.hf_assets_path
    gone = stored and not Path(stored).is_dir()
    if gone and not folder:
        raise UserError(f'model.hf_assets_path = "{stored}": no such folder; name its new path with {option}')
    return family_of(keys.model_copy(update={"hf_assets_path": folder if gone else stored}))


def vocabulary_of(keys: Model) -> int:
    """The size of the vocabulary of the model that [model] names. Raises UserError as `load_family` does."""
    return family_of(keys).config.vocab_size


def trusted(config: Config, source: Path, named: str) -> Config:
    """The configuration in a file, if its model may be imported: no name from a file decides which code runs.

    named: the module that the user names instead; without it, the model must be a family of the folder models/. Raises
    UserError.
    """
    if not named and config.model.name not in family_names():
        option = f"--model {config.model.name}, in Python name={config.model.name!r}"
        remedy = f"no code that a file names is run; if you trust it, add {option}"
        raise UserError(f"{source}: its model is {config.model.name!r}, not a family of models/; {remedy}")
    return config.model_copy(update={"model": config.model.model_copy(update={"name": named or config.model.name})})


def family_names() -> list[str]:
    """The families of the folder models/: the modules whose file has FLAVORS. The others are parts that families share."""
    specs = {found.name: importlib.util.find_spec(f"models.{found.name}") for found in pkgutil.iter_modules(models.__path__)}
    return [name for name, spec in specs.items() if spec and spec.origin and b"FLAVORS" in Path(spec.origin).read_bytes()]


def import_named(setting: str, dotted: str, remedy: str) -> ModuleType:
    """The module that the user names. setting: the key and its value, for messages. remedy: for a missing module.

    Raises UserError where there is no such module, and BrokenModule where its import fails.
    """
    if not dotted.startswith("models.") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where the user's own modules are
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
            raise BrokenModule(f"{setting}: {dotted} imports {error.name}, which is not installed") from error
        raise UserError(f"{setting}: there is no module {dotted}; {remedy}") from None
    except (Exception, SystemExit) as error:  # the user's module can raise anything
        raise BrokenModule(f"{setting}: importing {dotted} failed ({location_of(error)}): {error!r}") from error


def module_name(name: str) -> str:
    """The module that `model.name` names: one of models/, or a dotted name."""
    return name if "." in name else f"models.{name}"


def load_module(name: str) -> ModuleType:
    """The module of a family, with all parts of the interface. Raises UserError, or BrokenModule, which is one."""
    families = ", ".join(family_names())
    dotted = module_name(name)
    if not all(part.isidentifier() for part in dotted.split(".")):
        raise UserError(f"model.name = {name!r}: must be one of {families}, or a dotted module name")
    here = f"models/ has: {families}; for a module of your own give its dotted name, importable from here"
    module = import_named(f"model.name = {name!r}", dotted, here)
    if lacking := [part for part in OFFERS if not hasattr(module, part)]:
        raise BrokenModule(f"model.name = {name!r}: {module.__file__} lacks {', '.join(lacking)}; models/llama3.py shows each")
    if FROM_ASSETS in module.FLAVORS:
        raise BrokenModule(f'model.name = {name!r}: rename its flavor "{FROM_ASSETS}", which means a config.json')
    limits_of(module)
    return module


def limits_of(module: ModuleType) -> Limits:
    """What the family's file declares in LIMITS. Raises BrokenModule for an unknown name, or a value of another type."""
    declared, known, named = getattr(module, "LIMITS", {}), Limits._field_defaults, getattr(module, "__name__", "")
    if not isinstance(declared, dict):
        raise BrokenModule(f"{named}: LIMITS = {declared!r}: must be a dict, such as {{'generates': False}}")
    for name, value in declared.items():
        if name not in known:
            raise BrokenModule(f"{named}: LIMITS has no {name!r}{suggest(str(name), list(known))}")
        kind, allowed = (bool, "True or False") if type(known[name]) is bool else (int, "a whole number of ranks, at least 1")
        if type(value) is not kind or (kind is int and value < 1):
            raise BrokenModule(f"{named}: LIMITS[{name!r}] = {value!r}: must be {allowed}")
    return Limits(**declared)


def reader_of(description: Description, remedy: str) -> str:
    """The family of models/ that reads the model_type of a config.json. Raises UserError, which ends with `remedy`.

    A file that is no family yet, such as a fork in the making, is named only where no other reads the type.
    """
    kind, readers, broken = description["model_type"], dict[str, tuple[str, ...]](), ""
    for name in family_names():
        try:
            readers[name] = getattr(load_module(name), "HF_TYPES", ())
        except UserError as error:
            broken += f"; {error}"
    names = [name for name, kinds in readers.items() if kind in kinds]
    if len(names) != 1:
        have = "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in readers.items() if kinds)
        fault = f"{' and '.join(names)} both read" if names else f"no family of models/ ({have}) reads"
        inner = description.get("text_config")  # of a model that also reads images or audio, such as Gemma 3 from 4B
        if isinstance(inner, dict) and any(inner.get("model_type") in kinds for kinds in readers.values()):
            text = f"the text model of its text_config, a {inner['model_type']}"
            remedy += f"; or save {text}, alone (docs/guides/hugging_face.md)"
        raise UserError(f"{description.path}: {fault} model_type {kind!r}{'' if names else broken}{remedy}")
    return names[0]


def require_hf(module: ModuleType) -> None:
    """Raises UserError for a family that does not support Hugging Face's format."""
    if missing := [part for part in OFFERS_HF if not hasattr(module, part)]:
        raise UserError(f"{module.__name__}: lacks {', '.join(missing)}, which Hugging Face's format needs")


def described(module: ModuleType, description: Description) -> Any:
    """The family's own Config for a config.json. Raises UserError for features that the family lacks, and for unknown keys."""
    require_hf(module)
    try:
        config = module.from_hf(description)
    except KeyError as error:
        raise UserError(f"{description.path}: has no {error}, which {module.__name__} needs") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{description.path}: {module.__name__} cannot be built from it: {error}") from None
    if faults := [f"{description.path}: {fault}" for fault in unused_keys(description, module.__name__)]:
        raise UserError("\n".join(faults))
    return config


def location_of(error: BaseException) -> str:
    """File and line of an error: the innermost frame of a model's code if there is one, or that of a syntax error.

    Frames of what families share, such as models/blocks.py, are skipped: that of the fork shows how it called them.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    # The compiler traces code without calling it, and records the stack itself.
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    families = family_names()
    forks = [f for f in own if os.path.dirname(f.filename) != _FOLDER or Path(f.filename).stem in families]
    frame = (forks or own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
