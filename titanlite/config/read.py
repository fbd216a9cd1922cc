"""From TOML files and command-line options to one validated `Config`.

A file may name another one as `base = "other.toml"`; it then contains only the differences. Files and options are merged as
plain dictionaries and validated once, so that all faults are reported together, each with the file or option it comes from.
"""

import contextlib
import difflib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from titanlite.config.effects import OPTION, ConfigLayer, Hardware
from titanlite.config.schema import Config
from titanlite.config.tables import Section
from titanlite.ground.errors import HelpRequested, UserError, listed, phase, sentence
from titanlite.ground.untrusted import Absent, parse_toml, read_toml, validated

SECTIONS: dict[str, type[Section]] = {name: type(field.default) for name, field in Config.model_fields.items()}
# "section.key" -> its type
KEYS: dict[str, Any] = {
    f"{section}.{name}": field.annotation for section, schema in SECTIONS.items() for name, field in schema.model_fields.items()
}
# Keys of earlier versions, and options of other commands: what to write instead.
INSTEAD = {
    "compile.unit": "each block is one graph; remove the key",
    "ranks": "the environment says how many ranks there are: NGPU x NNODES",
}


class Faults(UserError):
    """All faults of one configuration. remedy: a line that concerns them all."""

    def __init__(self, path: str, faults: list[str], remedy: str = ""):
        super().__init__(path, faults, remedy)
        self.path, self.faults, self.remedy = path, faults, remedy

    def __str__(self) -> str:
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        return listed(f"{self.path}: {count}", self.faults, self.remedy)


def read_words(words: list[str], usage: str) -> tuple[str, Config]:
    """(configuration file, configuration) of a command's words: a file and options, as for `read_config`.

    Raises UserError if the first word is an option. For --help as the first word it prints the usage and exits.
    """
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\nwith --help behind CONFIG.toml: every option with its meaning and value")
        sys.exit(0)
    if not words or not words[0].strip() or words[0].startswith("-"):
        raise UserError("give a configuration first, such as train_configs/llama_debug.toml, then the options")
    return words[0], read_config(words[0], words[1:])


@phase("reading the configuration")
def read_config(path: str | Path | None, options: list[str]) -> Config:
    """The validated configuration of a TOML file, overridden by command-line options such as `--training.steps 50`.

    path: None for the options alone. Raises Faults that lists all faults of files and options; HelpRequested for `--help`.
    """
    origins: dict[str, ConfigLayer] = {}  # "section.key" -> the file or option that has set it
    values = _load_toml(Path(path), [], origins) if path else {}
    if "-h" in options or "--help" in options:
        raise HelpRequested(values)
    texts, faults = _parse_options(options)
    for key, text in texts.items():
        *tables, name = _path(key)
        table: Any = values
        for depth, above in enumerate(tables):
            if depth and isinstance(table, dict) and not isinstance(table.get(above), dict):
                table[above] = {}  # in place of a value, as a file's table replaces its base's value
            table = table.setdefault(above, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):  # a section that is none is a fault of the file, reported below
            value = _parse_value(key, text)
            if value == {}:  # the default of every table: it resets what a file sets
                table[name] = value
            else:
                _merge(table, {name: value})
            _note(origins, (*tables, name), value, OPTION)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        faults += _describe(error, origins)
        raise Faults(str(path or "options"), faults, _if_of_torchtitan(path, error, origins)) from None
    if faults:
        raise Faults(str(path or "options"), faults)
    vars(config)["layers"] = {key: layer for key, layer in origins.items() if key in KEYS}
    return config


def _if_of_torchtitan(path: str | Path | None, error: ValidationError, origins: dict[str, ConfigLayer]) -> str:
    """The command for a file with several names that titanlite does not have; a single one may be misspelled."""
    unknown = [".".join(map(str, entry["loc"])) for entry in error.errors() if entry["type"] == "extra_forbidden"]
    several = sum(origins.get(key, OPTION) != OPTION for key in unknown) > 1
    return f"if this is a file of torchtitan: titanlite convert-config {path} --output NEW.toml" if several else ""


# Values that titanlite had once, as patterns of their texts. None concerned the weights.
_GONE = {
    "model.attention": "flash3",
    "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
    "parallelism.fsdp_reshard_after_forward": "[0-9]+",
}


def stored_config(sections: dict[str, Any], source: Path) -> Config:
    """The configuration that a checkpoint or a run's folder holds, without keys and values that titanlite had when it was
    written and has no more, and with keys that had no effect at their defaults.

    Raises UserError that names the source and the key. `registry.trusted` says whether its model may be imported.
    """

    def gone(key: str, value: Any) -> bool:
        return key in INSTEAD or (key in _GONE and bool(re.fullmatch(_GONE[key], str(value))))

    def known(section: str, table: Any) -> Any:
        if not isinstance(table, dict):
            return table  # which is refused below
        return {name: value for name, value in table.items() if not gone(f"{section}.{name}", value)}

    sections = {section: known(section, table) for section, table in sections.items()}
    return validated(Config, sections, f"{source}: config").settled(Hardware())


def to_toml(config: Config) -> str:
    """The configuration as TOML text; `read_config` reads it back to `config.settled(Hardware())`.

    Keys that have no effect on any machine are comments: in one file with what switches them off they would be refused.
    """
    without_effect = {(key.section, key.name): key.condition for key in config.idle(Hardware())}
    lines = []
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for name, value in table.items():
            if value is None:  # TOML has no null: an optional key that is not set is left out
                continue
            setting, condition = f"{name} = {toml_value(value)}", without_effect.get((section, name))
            lines.append(f"# {setting}  (no effect unless {condition})" if condition else setting)
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A value of a configuration as TOML text. Entries of a table that are None are left out: TOML has no null."""
    if hasattr(value, "item"):  # a number of NumPy or torch
        value = value.item()
    if isinstance(value, dict):
        entries = [f"{toml_key(key)} = {toml_value(entry)}" for key, entry in value.items() if entry is not None]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    # a JSON string is a valid TOML basic string once DEL, which JSON does not escape, is escaped
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_value(name)


def _load_toml(path: Path, chain: list[Path], origins: dict[str, ConfigLayer]) -> dict[str, Any]:
    """The tables of a file merged over those of its `base`, whose path is relative to the file."""
    named_by = f" (named as base by {chain[-1]})" if chain else ""
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: no path has a zero byte{named_by}")
    if os.path.realpath(path) in map(os.path.realpath, chain):
        circle = " -> ".join(str(file) for file in [*chain, path])
        raise UserError(f"{chain[-1]}: base = {path.name!r} makes a cycle: {circle}")
    try:
        values = read_toml(path)
    except Absent:
        nearby = sorted(file.stem for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.stem, nearby, n=1)
        hint = f"; did you mean {path.parent / close[0]}.toml?" if close else ""
        raise UserError(f"{path}: no such configuration file{named_by}{hint}") from None
    except UserError as error:
        raise UserError(f"{error}{named_by}") from None
    base = values.pop("base", None)
    if base == "" or not isinstance(base, str | None):
        raise UserError(f"{path}: base = {base!r}: must be the name of a TOML file, as a string")
    merged = _load_toml(path.parent / base, [*chain, path], origins) if base else {}
    _merge(merged, values)
    for name, value in values.items():
        _note(origins, (name,), value, ConfigLayer(-len(chain), path.name))
    return merged


def _note(origins: dict[str, ConfigLayer], path: tuple[str, ...], value: Any, layer: ConfigLayer) -> None:
    """Records what has set a key, and those of a table."""
    origins[".".join(path[:2])] = origins[".".join(path)] = layer
    for name, inside in value.items() if isinstance(value, dict) else ():
        _note(origins, (*path, name), inside, layer)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Puts the values of `above` into `below`, table by table. A table with a rope_type is one value: a whole scaling."""
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict) and "rope_type" not in value:
            _merge(below[name], value)
        else:
            below[name] = value


# ---------------------------------------------------------------------------------------------------- command line


def _parse_options(options: list[str]) -> tuple[dict[str, str], list[str]]:
    """({"section.key": text}, faults). The texts become values in `_parse_value`; the validation finds unknown keys."""
    texts: dict[str, str] = {}
    faults: list[str] = []
    words = list(options)
    while words:
        word = words.pop(0)
        option, assigned, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            faults.append(f"{word}: belongs to no option; an option reads --section.key value")
            continue
        if not assigned and (not words or words[0].startswith("--")):
            faults.append(f"{option}: has no value; an option reads --section.key value")
            continue
        value = text if assigned else words.pop(0)
        if key in texts:
            faults.append(f"{option}: given twice, as {texts[key]!r} and {value!r}; give it once")
        texts[key] = value
    faults += [f"--{key} and --{inside}: give one of them" for key in texts for inside in texts if inside.startswith(f"{key}.")]
    return texts, faults


def _parse_value(key: str, text: str) -> Any:
    """The text of an option as the key's type; the validation reports an unknown key, and a text that does not fit."""
    annotation = KEYS.get(key, Any if len(_path(key)) > 2 else str)
    if type(None) in get_args(annotation) and text.lower() == "none":
        return None
    if get_origin(annotation) is list and not entry_schema(annotation) and not text.startswith("["):
        return text.split(",")
    if annotation is not Any:
        with contextlib.suppress(ValidationError):
            return TypeAdapter(annotation).validate_strings(text)
    if text.lower() in ("true", "false"):  # as for keys whose type is known
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?(\d+\.|\.\d+)", text):  # which TOML does not have
        return float(text)
    with contextlib.suppress(ValueError):  # tables: [{ path = "a" }], and numbers, so that the fault names them
        value = parse_toml(f"value = {text}")["value"]
        if isinstance(value, int | float | str | list | dict):  # not a date, which would be no value of a configuration
            return value
    return text


def _path(key: str) -> list[str]:
    """The tables of an option, and its name: section and key, or more where the key is a table, as in model.overrides.dim."""
    section, *names = key.split(".")
    if names and get_origin(KEYS.get(f"{section}.{names[0]}", dict[str, Any])) is not dict:
        return [section, ".".join(names)]  # a key is no table: it is not replaced by one
    return [section, *names]


def entry_schema(annotation: Any) -> type[BaseModel] | None:
    """The schema of the tables in a list of tables; None for every other type."""
    entry = get_args(annotation)[0] if get_origin(annotation) is list else None
    return entry if isinstance(entry, type) and issubclass(entry, BaseModel) else None


# ------------------------------------------------------------------------------------------------------ validation


def _describe(error: ValidationError, origins: dict[str, ConfigLayer]) -> list[str]:
    """One sentence for each key, or entry of a list of tables, in which pydantic has found errors."""
    by_path: dict[tuple[Any, ...], list[Any]] = {}
    for entry in error.errors():
        path = entry["loc"]
        in_entry = len(path) > 2 and entry_schema(KEYS.get(f"{path[0]}.{path[1]}"))
        by_path.setdefault(path[: 4 if in_entry else 2], []).append(entry)
    return [_sentence(path, errors, origins) for path, errors in by_path.items()]


def _sentence(path: tuple[Any, ...], errors: list[Any], origins: dict[str, ConfigLayer]) -> str:
    """One line for the errors in a key, or in an entry of a list of tables, such as [[training.sources]]."""
    key = ".".join(path[:2])
    where, name = (f"{key}, entry {path[2] + 1}: ", "".join(path[3:])) if len(path) > 2 else ("", key)
    found = where + sentence(errors, name, origins[key].name if key in origins else "", _unknown(path, errors[0]["input"]))
    return f"{found}; write [{key}] with its keys below" if errors[0]["type"] == "model_type" and len(path) == 1 else found


def _unknown(path: tuple[Any, ...], value: Any) -> str:
    """What is said of a key that the schema does not have, with what was probably meant."""
    key, name = ".".join(map(str, path)), str(path[-1])
    if len(path) > 2:
        return f"no such key{suggest(name, list(get_args(KEYS[f'{path[0]}.{path[1]}'])[0].model_fields))}"
    if key in INSTEAD:
        return f"not a key of titanlite: {INSTEAD[key]}"
    if same_name := [each for each in KEYS if each.partition(".")[2] == name]:
        hint = f"; did you mean {' or '.join(same_name)}?"
    elif len(path) == 2:
        hint = suggest(name, list(SECTIONS[path[0]].model_fields), f"{path[0]}.")
    else:
        hint = suggest(name, list(SECTIONS))
    what = "no such key" if len(path) == 2 else "no such section" if isinstance(value, dict) else "is in no section"
    return what + hint


def suggest(word: str, known: list[str], prefix: str = "") -> str:
    """What may have been meant, or else the list of all."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; there are: {', '.join(known)}"
