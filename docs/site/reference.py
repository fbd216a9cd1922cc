"""The reference, written from the source: python -m docs.site.reference

It writes docs/reference/keys.md, which is committed, so that it is there on a code host too. What needs torch is a page of the
site alone: docs/site/hooks.py asks for it when the site is built.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from annotated_types import Le
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from titanlite.__main__ import COMMANDS
from titanlite.config.bounds import LOST
from titanlite.config.effects import effective_when
from titanlite.config.read import SECTIONS, entry_schema
from titanlite.config.tables import Section
from titanlite.ground.errors import HelpRequested
from titanlite.tools.help import type_name

ROOT = Path(__file__).parents[2]
KEYS_PAGE = ROOT / "docs" / "reference" / "keys.md"
_KEYS_HEAD = """# Keys

<!-- made by: python -m docs.site.reference -->

Every key of a configuration file; `./run_train.sh CONFIG.toml --help` shows them with the values of your file. On the command
line, a key is an option: `--training.steps 50`. "Resume" says whether a run may continue from a checkpoint with another value:
"yes"; "if allowed", where `checkpoint.allow_changes` names the key; or "no", with the reason. Where a key has no effect, a file
that sets it is refused.

"""
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def keys_page() -> str:
    """Markdown: a heading, and so an anchor, for each key of the schema."""
    parts = [_KEYS_HEAD + " · ".join(f"[{section}](#{section})" for section in SECTIONS) + "\n"]
    for section, schema in SECTIONS.items():
        parts.append(f"## {section}\n\n{_prose(schema.__doc__)}\n")
        parts += [_key(section, name, schema) for name in schema.model_fields]
    return "\n".join(parts)


def _key(section: str, name: str, schema: type[Section]) -> str:
    """A key's heading, its docstring, and a list of what the schema says of it."""
    field, rule = schema.model_fields[name], schema.on_resume(name)
    conditions = " and ".join(f"`{condition}`" for condition in effective_when(field).conditions)
    resume = "if allowed" if rule is None else f"no: {rule.refused}" if rule.refused else "yes"
    facts = [f"- Type: {_type(field)}{_bounds(name, schema)}", f"- Default: {_default(field)}"]
    facts += [f"- Effect: only where {conditions}"] if conditions else []
    lines = [f"### {section}.{name}", "", _prose(field.description), "", *facts, f"- Resume: {resume}"]
    if entry := entry_schema(field.annotation):
        lines += ["", *_entry_table(entry)]
    return "\n".join(lines) + "\n"


def _entry_table(entry: type[BaseModel]) -> list[str]:
    """The keys of each table in a list of tables."""
    rows = [
        f"| `{name}` | {_type(field)} | {'needed' if field.is_required() else _default(field)} | {_prose(field.description)} |"
        for name, field in entry.model_fields.items()
    ]
    return ["| key of each table | type | default | meaning |", "| --- | --- | --- | --- |", *rows]


def _type(field: FieldInfo) -> str:
    return f"`{type_name(field.annotation)}`".replace("|", "` or `")


def _default(field: FieldInfo) -> str:
    value = field.get_default()
    return "unset" if value is None else f"`{json.dumps(value, default=str)}`"


def _bounds(name: str, schema: type[Section]) -> str:
    """Of the numbers that a key takes."""
    options = TypeAdapter(schema).json_schema()["properties"][name]
    numbers = [option for option in options.get("anyOf", [options]) if option.get("type") in ("integer", "number")]
    limits = {limit: option[limit] for option in numbers for limit in _LIMITS if limit in option}
    if most := [rule.le for rule in schema.model_fields[name].metadata if isinstance(rule, Le)]:
        limits["maximum"] = min(most)  # where there are several, the JSON schema has only one
    if carried := _carried(name, schema):  # is narrower, but for some upper bounds
        most_carried = float(carried.split()[-1])
        limits = {limit: value for limit, value in limits.items() if limit == "maximum" and value < most_carried}
    texts = [carried] if carried else []
    return "".join(f", {text}" for text in [*texts, *(f"{_LIMITS[limit]} {value:,}" for limit, value in limits.items())])


def _carried(name: str, schema: type[Section]) -> str:
    """What the validator of a number says of one that float32 loses, such as "0, or from 1e-09 to 1e+09"; "" without one."""
    try:
        schema.model_validate({name: 1e-300})
    except ValidationError as error:
        messages = [fault["msg"] for fault in error.errors() if fault["type"] == LOST]
        return messages[0].removeprefix("Input should be ") if messages else ""
    return ""


def _prose(text: str | None) -> str:
    """A docstring as one line of Markdown; the pages that it names are links."""
    line = " ".join((text or "").split()).replace("*", r"\*").replace("<", "&lt;").replace("|", r"\|")
    return re.sub(r"docs/(\w+)/(\w+\.md)", lambda page: f"[{page[2]}](../{page[1]}/{page[2]})", line)


def commands_page() -> str:
    """Markdown: each command with what --help prints, and the variables of the launcher. Imports torch."""
    script = (ROOT / "run_train.sh").read_text(encoding="utf-8")
    header = re.sub(r"^# ?", "", script[script.index("# Trains") : script.index("\nset ")], flags=re.MULTILINE)
    parts = ["# Commands, exit codes, environment variables", "", "## run_train.sh", "", *_block(header), ""]
    for command, (module, meaning) in COMMANDS.items():
        parts += [f"## titanlite {command}", "", f"{meaning[0].upper()}{meaning[1:]}.", "", *_block(_help(command, module)), ""]
    return "\n".join(parts)


def _help(command: str, module: str) -> str:
    """What a command prints for --help."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [f"titanlite {command}", "--help"]),
        mock.patch.dict(os.environ, COLUMNS="110"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit, HelpRequested),
    ):
        importlib.import_module(module).main()
    return printed.getvalue()


def models_page() -> str:
    """Markdown for mkdocstrings: what a fork imports, by the lines of docs/reference/interface.md."""
    interface = (ROOT / "docs" / "reference" / "interface.md").read_text(encoding="utf-8")
    names = re.findall(r"^ {4}(\w+)\.(\w+)\(", interface, re.MULTILINE)
    parts = ["# What a fork imports", "", "[The interface of forks](interface.md) says which of these stay as they are.", ""]
    for module in dict.fromkeys(module for module, _ in names):
        parts += [f"## models.{module}", ""] + [f"::: models.{module}.{name}" for of, name in names if of == module] + [""]
    return "\n".join(parts)


def _block(text: str) -> list[str]:
    return ["```text", *text.strip("\n").splitlines(), "```"]


# Pages of the site that no file has: their paths in docs/, and what writes them.
GENERATED: dict[str, Any] = {
    "reference/commands.md": commands_page,
    "reference/models.md": models_page,
}

if __name__ == "__main__":
    KEYS_PAGE.write_text(keys_page(), encoding="utf-8")
