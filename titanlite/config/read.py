"""From TOML files and command-line options to one validated `Config`.

A file may name another one as `base = "other.toml"` and then holds only what differs. Files and options are merged as
plain dictionaries and validated once, so that every fault is reported together, each with the place it comes from.
"""

import contextlib
import dataclasses
import difflib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import tyro
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from titanlite.config.renamed_keys import INSTEAD
from titanlite.config.schema import Config
from titanlite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Given(NamedTuple):
    """What the user gave, before validation."""

    values: dict[str, Any]  # section -> key -> value, as in the TOML file
    origins: dict[str, str]  # "section.key" -> the file or option that set it
    unknown_options: list[str]


def read_config(path: str | Path, options: list[str]) -> Config:
    """The validated configuration of a TOML file with command-line options such as `--training.steps 50` over it.

    Raises UserError that lists all faults of files and options at once. `--help` prints every option and exits.
    """
    origins: dict[str, str] = {}
    values = _load_toml(Path(path), [], origins)
    flags, unknown = _parse_options(options, values)
    for key, text in flags.items():
        section, name = key.split(".")
        table = values.setdefault(section, {})
        if isinstance(table, dict):  # otherwise the file's fault is reported below
            table[name] = _value_of(section, name, text)
            origins[key] = "option"
    return _validate(Given(values, origins, unknown), str(path))


def to_toml(config: Config) -> str:
    """The configuration as TOML text, which `read_config` reads back to an equal configuration."""
    lines = []
    for section, keys in config.model_dump().items():
        lines.append(f"[{section}]")
        # A JSON string is a valid TOML basic string once DEL, which JSON leaves alone, is escaped. An optional key that
        # is not set is left out: TOML has no null.
        lines += [f"{key} = {_toml_value(value)}" for key, value in keys.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(entry)}" for key, entry in value.items() if entry is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(entry) for entry in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _load_toml(path: Path, chain: list[Path], origins: dict[str, str]) -> dict[str, Any]:
    """The tables of a file laid over those of its `base`, which is looked up beside it."""
    named_by = f" (named as base by {chain[-1]})" if chain else ""
    real = path.resolve()
    if real in [file.resolve() for file in chain]:
        circle = " -> ".join(str(file) for file in [*chain, path])
        raise UserError(f"{chain[-1]}: base = {path.name!r} closes a circle: {circle}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        nearby = sorted(file.stem for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.stem, nearby, n=1)
        hint = f"; did you mean {path.parent / close[0]}.toml?" if close else ""
        raise UserError(f"{path}: no such configuration file{named_by}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read{named_by}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    base = values.pop("base", None)
    if base is None:
        merged: dict[str, Any] = {}
    elif isinstance(base, str) and base:
        merged = _load_toml(path.parent / base, [*chain, path], origins)
    else:
        raise UserError(f"{path}: base = {base!r}: must be the name of a TOML file, as a string")
    for section, table in values.items():
        if isinstance(table, dict) and isinstance(merged.get(section), dict):
            merged[section].update(table)
        else:
            merged[section] = table
        for key in table if isinstance(table, dict) else ():
            origins[f"{section}.{key}"] = path.name
    return merged


# ---------------------------------------------------------------------------------------------------- command line

_UNSET = "\0unset"


def _parse_options(options: list[str], file_values: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The options that were given, as {"section.key": text}, and the words that are no option.

    tyro draws the help and splits the words; texts become values in `_value_of`, so that a wrong one is reported
    together with the faults of the files.
    """
    sections = []
    for section, field in Config.model_fields.items():
        schema = field.annotation
        members = []
        for name, info in schema.model_fields.items():
            in_file = file_values.get(section)
            value = in_file.get(name, info.default) if isinstance(in_file, dict) else info.default
            hint = tyro.conf.arg(
                metavar=_type_name(info.annotation),
                help=info.description,
                help_behavior_hint=f"(now: {json.dumps(value, default=str)})",
            )
            members.append((name, Annotated[str, hint], _UNSET))
        table = dataclasses.make_dataclass(schema.__name__, members)
        table.__doc__ = schema.__doc__
        sections.append((section, table, dataclasses.field(default_factory=table)))
    parsed, unknown = tyro.cli(
        dataclasses.make_dataclass("Options", sections),
        args=options,
        prog="run_train.sh CONFIG.toml",
        description="Every key of the TOML file is an option; (now: ...) is the value that the file or its default gives.",
        return_unknown_args=True,
        use_underscores=True,
    )
    flags = {
        f"{section}.{name}": text
        for section, table in vars(parsed).items()
        for name, text in vars(table).items()
        if text is not _UNSET
    }
    return flags, unknown


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is list:
        entry = get_args(annotation)[0]
        return "[{KEY=VALUE,...},...]" if _is_table(entry) else f"{_type_name(entry)},..."
    names = {"boolean": "BOOL", "integer": "INT", "number": "FLOAT", "string": "TEXT", "null": "NONE"}
    schema = TypeAdapter(annotation).json_schema()
    parts = []
    for option in schema.get("anyOf", [schema]):
        parts += option["enum"] if "enum" in option else [option.get("const") or names[option["type"]]]
    return "|".join(parts)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _tables(text: str) -> Any:
    """A list of tables as TOML writes it, [{ path = "a", weight = 0.5 }]; what is none is left for the validation to report."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _value_of(section: str, name: str, text: str) -> Any:
    """The text of an option as the key's type; a text that does not fit is left for the validation to report."""
    annotation = Config.model_fields[section].annotation.model_fields[name].annotation
    if type(None) in get_args(annotation) and text.lower() == "none":
        return None
    if get_origin(annotation) is list:
        return _tables(text) if _is_table(get_args(annotation)[0]) else text.split(",")
    try:
        return TypeAdapter(annotation).validate_strings(text)
    except ValidationError:
        for number in (int, float):  # so that the fault is told of the number, not of its text
            with contextlib.suppress(ValueError):
                return number(text)
        return text


# ------------------------------------------------------------------------------------------------------ validation


def _validate(given: Given, path: str) -> Config:
    faults = [_unknown_option(word) for word in given.unknown_options if word.startswith("-")]
    strays = [word for word in given.unknown_options if not word.startswith("-")]
    if strays and not faults:
        faults.append(f"{' '.join(strays)}: belongs to no option; an option reads --section.key value")
    try:
        config = Config.model_validate(given.values)
    except ValidationError as error:
        by_key: dict[tuple[Any, ...], list[Any]] = {}
        for fault in error.errors():
            in_table = len(fault["loc"]) > 2 and _is_list_of_tables(*fault["loc"][:2])
            by_key.setdefault(fault["loc"][: 4 if in_table else 2], []).append(fault)
        faults += [
            _entry_sentence(*place, found=found) if len(place) > 2 else _sentence(*place, given=given, found=found)
            for place, found in by_key.items()
        ]
    if faults:
        raise UserError(report(path, faults))
    return config


def report(path: str, faults: list[str]) -> str:
    """One text for all faults of one configuration."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return "\n".join([f"{path}: {count}", *(f"  {fault}" for fault in faults)])


def _sentence(section: str, name: str = "", *, given: Given, found: list[Any]) -> str:
    """One line for what pydantic found at one key: where it comes from, what is wrong, what is allowed."""
    kind, value = found[0]["type"], found[0]["input"]
    key = f"{section}.{name}"
    if kind == "extra_forbidden":
        return _unknown_key(section, name, value, given.origins.get(key))
    if kind in ("model_type", "model_attributes_type"):
        return f"{section} = {value!r}: must be a table; write [{section}] with its keys below"
    allowed = " or ".join(fault["msg"].replace("Input should be ", "") for fault in found)
    return f"{_setting(key, value, given.origins.get(key))}: must be {allowed}"


def _entry_sentence(section: str, name: str, number: int, key: str = "", *, found: list[Any]) -> str:
    """One line for what pydantic found in an entry of a list of tables, such as [[training.sources]]."""
    kind, value, place = found[0]["type"], found[0]["input"], f"{section}.{name}, entry {number + 1}"
    if not key:
        return f"{place} = {json.dumps(value, default=str)}: must be a table; write [[{section}.{name}]] with its keys below"
    if kind == "extra_forbidden":
        schema = get_args(Config.model_fields[section].annotation.model_fields[name].annotation)[0]
        return f"{place}: {_setting(key, value, None)}: no such key{_meant(key, list(schema.model_fields), others=True)}"
    if kind == "missing":
        return f"{place}: has no {key}"
    allowed = " or ".join(fault["msg"].replace("Input should be ", "") for fault in found)
    return f"{place}: {_setting(key, value, None)}: must be {allowed}"


def _is_list_of_tables(section: str, name: str) -> bool:
    field = Config.model_fields[section].annotation.model_fields.get(name)
    return field is not None and get_origin(field.annotation) is list and _is_table(get_args(field.annotation)[0])


def _setting(key: str, value: Any, origin: str | None) -> str:
    return f"{key} = {json.dumps(value, default=str)}" + (f" ({origin})" if origin else "")


def _unknown_key(section: str, name: str, value: Any, origin: str | None) -> str:
    """What stands in the file and not in the schema: a key, or without a name a section or a key above all sections."""
    known = Config.model_fields
    key = f"{section}.{name}" if name else section
    what = _setting(key, value, origin) if name or not isinstance(value, dict) else f"[{section}]"
    if key in INSTEAD or section in INSTEAD:
        return f"{what}: not a key of titanlite: {INSTEAD.get(key) or INSTEAD[section]}"
    if not name and isinstance(value, dict):
        return f"{what}: no such section{_meant(section, list(known), others=True)}"
    same_name = [f"{other}.{name or section}" for other, field in known.items() if (name or section) in _keys(field)]
    hint = f"; did you mean {' or '.join(same_name)}?" if same_name else ""
    if not name:
        return f"{what}: stands in no section{hint or _meant(section, list(known), others=True)}"
    return f"{what}: no such key{hint or _meant(name, _keys(known[section]), f'{section}.', others=True)}"


def _keys(section: FieldInfo) -> list[str]:
    return list(section.annotation.model_fields)


def _unknown_option(word: str) -> str:
    key = word.lstrip("-").split("=")[0].replace("-", "_")
    if key in INSTEAD or key.partition(".")[0] in INSTEAD:
        return f"--{key}: not an option of titanlite: {INSTEAD.get(key) or INSTEAD[key.partition('.')[0]]}"
    every = [f"{section}.{name}" for section, field in Config.model_fields.items() for name in _keys(field)]
    same_name = [known for known in every if known.partition(".")[2] == key.rpartition(".")[2]]
    if same_name:
        return f"{word}: no such option; did you mean --{' or --'.join(same_name)}?"
    return f"{word}: no such option{_meant(key, every, '--') or '; --help lists them all'}"


def _meant(word: str, known: list[str], prefix: str = "", others: bool = False) -> str:
    """ "; did you mean X?", or with `others` the list of what there is, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; there are: {', '.join(known)}" if others else ""
