"""What --help prints after the name of a configuration file."""

import argparse
import json
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter

from titanlite.config.effects import effective_when
from titanlite.config.read import SECTIONS, entry_schema


def print_help(file_values: dict[str, Any]) -> None:
    """Prints every option with its type, meaning and current value."""
    parser = argparse.ArgumentParser(
        usage="run_train.sh CONFIG.toml [--section.key value ...]",
        description="Every key of the TOML file is an option; (now: ...) is the value from the file, or else the default.",
        add_help=False,
    )
    for section, schema in SECTIONS.items():
        table = file_values.get(section)
        group = parser.add_argument_group(section, schema.__doc__)
        for name, field in schema.model_fields.items():
            value = table.get(name, field.default) if isinstance(table, dict) else field.default
            conditions = effective_when(field).conditions
            only = f" Has no effect unless {' and '.join(conditions)}." if conditions else ""
            meaning = f"{field.description}{only} (now: {json.dumps(value, default=str)})".replace("%", "%%")
            group.add_argument(f"--{section}.{name}", metavar=type_name(field.annotation), help=meaning)
    parser.print_help()


def type_name(annotation: Any) -> str:
    """The name of a key's type, as --help shows it: INT, TEXT, auto|flash."""
    if get_origin(annotation) is list:
        return "[{KEY=VALUE,...},...]" if entry_schema(annotation) else f"{type_name(get_args(annotation)[0])},..."
    names = {
        "boolean": "BOOL",
        "integer": "INT",
        "number": "FLOAT",
        "string": "TEXT",
        "null": "NONE",
        "object": "{KEY=VALUE,...}",
    }
    schema = TypeAdapter(annotation).json_schema()
    parts: list[str] = []
    for option in schema.get("anyOf", [schema]):
        parts += option["enum"] if "enum" in option else [str(option["const"]) if "const" in option else names[option["type"]]]
    return "|".join(parts)
