"""Wrong keys, drawn from the schema: one for each kind of annotation, one for each condition under which a key has an effect.

How pydantic and titanlite treat a key depends only on its kind; a new key needs no line here.
"""

import contextlib
import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.hostile.judge import Case
from titanlite.config import effects
from titanlite.config.read import KEYS, SECTIONS, read_config, read_words
from titanlite.config.schema import Source
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.tools.options import config_parser, read_command

FIELDS: dict[str, FieldInfo] = {key: SECTIONS[key.split(".")[0]].model_fields[key.split(".")[1]] for key in KEYS}
# A value of each TOML type, by its name in a JSON schema.
TYPES = {
    "string": '"seven"',
    "integer": "7",
    "number": "7.5",
    "boolean": "true",
    "array": "[[7]]",
    "object": "{ a = 7 }",
    "date": "2020-02-02",
}
OF_THE_PLACE = (effects.CUDA, effects.RANKS, effects.ACCUMULATION)
# Values of keys for which the schema gives no other value.
OTHERS = {"model.overrides": "{ dim = 64 }", "checkpoint.load_step": "3", "training.sources": '[{ path = "text" }]'}
OTHERS |= {
    "lr_scheduler.decay_type": '"tests.own.parts:inverse_sqrt"',
    "lr_scheduler.options": "{ power = 2.0 }",
    "training.loss": '"tests.own.parts:undemanding"',  # with a teacher and without
    "training.dataset": '"tests.own.parts:Sums"',
    "training.dataset_options": "{ digits = 1 }",
    "validation.dataset": '"tests.own.parts:Sums"',
    "validation.dataset_options": "{ digits = 1 }",
    "training.loss_options": "{ share = 0.2 }",
    "metrics.extra": '["tests.own.parts:head_entropy"]',
    "metrics.extra_options": "{ head_entropy = { every = 4 } }",
    "hooks.modules": '["tests.own.parts"]',
    "optimizer.name": '"tests.own.parts:Lion"',
    "optimizer.options": "{ betas = [0.9, 0.98] }",
    "optimizer.groups": '[{ pattern = "layers.*", lr = 0.5 }]',
    "validation.sources": OTHERS["training.sources"],
    "compile.backend": '"eager"',
}
# Further settings that a run needs with another value of a key.
BESIDE = {
    "parallelism.pipeline_parallel_degree": {"training.local_batch_size": "1", "training.global_batch_size": "2"},
}


def cases(seed: int) -> Iterator[Case]:
    """The seed chooses the key of each kind, and where a misspelled key is wrong."""
    draw = random.Random(seed)
    kinds: dict[str, list[str]] = {}
    for key in KEYS:
        kinds.setdefault(kind_of(ALTERNATIVES[key]), []).append(key)
    for key in map(draw.choice, kinds.values()):
        yield from _wrong_types(key)
        yield from _out_of_bounds(key)
        yield from _twice(key)
        yield from _misspelt(key, draw)
    conditions: dict[str, list[str]] = {}
    for key in KEYS:
        for condition in effects.effective_when(FIELDS[key]).conditions:
            conditions.setdefault(condition, []).append(key)
    for condition, keys in conditions.items():
        yield from _without_effect(draw.choice(keys), condition)
    yield from _entries()
    yield from _layers()
    yield from _options()


# --------------------------------------------------------------------------------------------------- files and options


def toml(settings: dict[str, str], base: str = "") -> str:
    """A file with these settings. base: the name of another one."""
    head = [f'base = "{base}"'] if base else []
    return "\n".join([*head, *(f"{key} = {value}" for key, value in settings.items()), ""])


def _with_file(text: str, action: Callable[[], object], base: str = "") -> Callable[[Path], Callable[[], object]]:
    """base: the text of base.toml."""

    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text(text, encoding="utf-8")
        (folder / "base.toml").write_text(base, encoding="utf-8")
        return action

    return make


def _read(text: str, *options: str) -> Callable[[Path], Callable[[], object]]:
    """Reads a configuration as a command does."""
    return _with_file(text, lambda: read_words(["run.toml", *options], ""))


def _check(text: str, *options: str, base: str = "", right: str = "") -> Callable[[Path], Callable[[], object]]:
    """Reads and checks a run on one rank, or on two stages, as a rank does at its start.

    right: it is accepted, and the line on keys without effect has this text.
    """

    def action() -> None:
        config = read_config("run.toml", list(options))
        check(config, "run.toml", 2 if config.parallelism.pipeline_parallel_degree == 2 else 1, open_files=False)
        note = effects.note(config.idle(effects.Hardware(False, 1)))
        assert not right or re.search(right, note), f"the line at the start does not name {right!r}: {note!r}"

    return _with_file(text, action, base)


def _of_file_and_option(key: str, name: str, value: str) -> Iterator[Case]:
    """A wrong value, in a file and as an option."""
    names = rf"{re.escape(key)} = .*must be "
    yield Case(f"{key} {name} in a file", _read(toml({key: value})), names)
    yield Case(f"{key} {name} as an option", _read("", f"--{key}={value}"), names)


# ------------------------------------------------------------------------------------------------------ types and bounds


def alternatives(table: type[BaseModel], name: str) -> list[dict[str, Any]]:
    """The JSON schemas of the alternatives of a key."""
    kind = table.model_json_schema()["properties"][name]
    return list(kind.get("anyOf", [kind]))


ALTERNATIVES = {key: alternatives(SECTIONS[key.split(".")[0]], key.split(".")[1]) for key in KEYS}


def kind_of(found: list[dict[str, Any]]) -> str:
    """The types of a key with their other constraints in the schema, without numbers and words."""
    parts = [(each["type"], sorted(set(each) - {"title", "default", "description"}), each.get("items")) for each in found]
    return str(sorted(parts, key=str))


def bounds(each: dict[str, Any]) -> tuple[float | None, float | None]:
    """The least and the largest number."""
    return each.get("minimum", each.get("exclusiveMinimum")), each.get("maximum", each.get("exclusiveMaximum"))


def _types(kinds: list[dict[str, Any]]) -> set[str]:
    found = {each["type"] for each in kinds}
    return found | ({"integer"} if "number" in found else set())  # TOML writes 1 for 1.0


def _wrong_types(key: str) -> Iterator[Case]:
    for kind in sorted(set(TYPES) - _types(ALTERNATIVES[key])):
        yield Case(f"{key} of type {kind}", _read(toml({key: TYPES[kind]})), rf"{re.escape(key)}\b")
    if not {"string", "array", "object"} & _types(ALTERNATIVES[key]):
        yield from list(_of_file_and_option(key, "of words", '"a b"'))[1:]
    if values := next((each["enum"] for each in ALTERNATIVES[key] if "enum" in each), None):
        yield from _of_file_and_option(key, "of another case", f'"{str(values[0]).swapcase()}"')


def _out_of_bounds(key: str) -> Iterator[Case]:
    for each in ALTERNATIVES[key]:
        if each["type"] in ("integer", "number") and "const" not in each:
            (least, most), whole = bounds(each), each["type"] == "integer"
            values = {"below": least - 3, "far below": -(10**20)} if whole else {"below": least - 1e-3, "far below": -1e308}
            if most is not None:
                values |= {"above": most + 1, "far above": 10**20} if whole else {"above": most * 1.1, "far above": 1e308}
            for name, value in values.items():
                yield from _of_file_and_option(key, f"{name} its bounds", repr(value))
            if not whole:
                yield from _of_file_and_option(key, "not a number", "nan")
        if "maxLength" in each:
            yield Case(f"{key} too long", _read(toml({key: json.dumps("a" * 1001)})), rf"{re.escape(key)}\b")
            yield Case(f"{key} with NUL", _read(toml({key: '"a\\u0000b"'})), rf"{re.escape(key)}\b")
        if "minItems" in each:
            yield Case(f"{key} empty", _read(toml({key: "[]"})), rf"{re.escape(key)}\b")


# ---------------------------------------------------------------------------------------------------------- no effect


def other(key: str) -> str:
    """A value of a key, as TOML, that is not its default."""
    if key in OTHERS:
        return OTHERS[key]
    field = FIELDS[key]
    default, kinds = field.get_default(), {each["type"]: each for each in ALTERNATIVES[key]}
    for each in kinds.values():
        if values := [value for value in each.get("enum", []) if value != default]:
            return json.dumps(values[0])
    if "boolean" in kinds:
        return json.dumps(not default)
    if "integer" in kinds:
        return str(max(3, kinds["integer"].get("minimum", 0)) + (3 if default == 3 else 0))
    if "number" in kinds:
        return "0.25" if default != 0.25 else "0.5"
    item = kinds["array"]["items"] if "array" in kinds else {}
    return json.dumps([item["enum"][0] if "enum" in item else "a"] if item else "a")


def of_the_hardware(condition: str) -> bool:
    """Whether a condition depends on the device or on the number of ranks."""
    return any(part in OF_THE_PLACE for part in condition.split(" or "))


def _candidates(key: str) -> Iterator[str]:
    for each in ALTERNATIVES[key]:
        yield from map(json.dumps, each.get("enum", []))
        yield from {"boolean": ("false", "true"), "integer": ("0", "1", "2"), "number": ("0.0", "1.0")}.get(each["type"], ())
        yield from (json.dumps([item]) for item in each.get("items", {}).get("enum", []))
    yield other(key)


@functools.cache
def where(condition: str, holds: bool) -> dict[str, str]:
    """Settings under which a condition holds, or does not; none if that is the default or depends on the hardware."""
    if of_the_hardware(condition):
        return {}
    rule, switches = effects.EffectiveWhen(condition), effects.keys_of(condition)
    for settings in ({}, *({key: value} for key in switches for value in _candidates(key))):
        with contextlib.suppress(UserError):  # the schema does not allow the value
            config = read_config(None, [f"--{key}={as_option(value)}" for key, value in settings.items()])
            if (rule.failing(config, effects.Hardware()) is None) == holds:
                return {name: value for key in settings for name, value in BESIDE.get(key, {}).items()} | settings
    raise AssertionError(f"no value of {switches} decides about: {condition}")


def setting(key: str, condition: str) -> dict[str, str]:
    """The key with a value other than the default, where this condition does not hold but all its others do."""
    settings: dict[str, str] = {}
    for each in effects.effective_when(FIELDS[key]).conditions:
        settings |= where(each, each != condition)
    return settings | {key: other(key)}


def _without_effect(key: str, condition: str) -> Iterator[Case]:
    settings = setting(key, condition)
    names = rf"{re.escape(key)} = .*has no effect unless {re.escape(condition)}"
    given = settings.pop(key)
    option = f"--{key}={as_option(given)}"
    yield Case(f"{key} as an option unless {condition}", _check(toml(settings), option), names)
    if of_the_hardware(condition):
        in_file = _read_and_note(toml(settings | {key: given}), names)
        yield Case(f"{key} in a file unless {condition}", in_file, names, right=True)
    else:
        yield Case(f"{key} in a file unless {condition}", _check(toml(settings | {key: given})), names)


def _read_and_note(text: str, words: str) -> Callable[[Path], Callable[[], object]]:
    """Reads a file on a machine without a GPU, with one rank: a line names the key, which then has its default."""

    def action() -> None:
        config = read_config("run.toml", [])
        idle, hardware = config.idle(effects.Hardware(False, 1)), effects.Hardware(False, 1)
        assert list(effects.faults(idle)) == []
        assert re.search(words, effects.note(idle)), effects.note(idle)
        assert not any(key.value != key.default for key in config.settled(hardware).idle(hardware))

    return _with_file(text, action)


def as_option(value: str) -> str:
    if value.startswith('"'):
        return str(json.loads(value))
    return ",".join(json.loads(value)) if value.startswith("[") and "{" not in value else value


def _layers() -> Iterator[Case]:
    on, off = {"validation.enable": "true", "validation.freq": "7"}, {"validation.enable": "false"}
    note = r"validation\.freq = 7 \(\w+\.toml\): has no effect unless validation\.enable = true"
    names = r"validation\.freq = 7 \(.*\): has no effect unless validation\.enable = true"
    later = {
        "a file": _check(toml(off, "base.toml"), base=toml(on), right=note),
        "an option": _check(toml(on), "--validation.enable=false", right=note),
    }
    for name, make in later.items():
        yield Case(f"a feature that {name} switches off later", make, names, right=True)
    same = {
        "a base": _check(toml({}, "base.toml"), base=toml(on | off)),
        "a file": _check(toml(on | off)),
        "a file over its base": _check(toml({"validation.freq": "7"}, "base.toml"), base=toml(off)),
        "options": _check(toml(on), "--validation.enable=false", "--validation.freq=7"),
        "an option over a file": _check(toml(off), "--validation.freq=7"),
    }
    for name, make in same.items():
        yield Case(f"a feature that is off, and its key of {name}", make, names)


# ----------------------------------------------------------------------------------------------- twice, misspelt, others


def _twice(key: str) -> Iterator[Case]:
    value = as_option(other(key))
    dashes = key.replace("_", "-")
    yield Case(f"{key} twice", _read("", f"--{key}={value}", f"--{key}={value}"), rf"--{re.escape(key)}: given twice")
    yield Case(f"{key} twice, apart", _read("", f"--{key}", value, f"--{dashes}", value), "given twice")


def _misspelt(key: str, draw: random.Random) -> Iterator[Case]:
    section, name = key.split(".")
    for wrong in (name[: (hardware := draw.randrange(len(name)))] + name[hardware + 1 :], name + name[-1]):
        if not wrong or f"{section}.{wrong}" in KEYS:
            continue
        names = rf"{re.escape(section)}\.{re.escape(wrong)}\b.*(no such key|not a key)"
        yield Case(f"{key} misspelt {wrong} in a file", _read(toml({f"{section}.{wrong}": "1"})), names)
        yield Case(f"{key} misspelt {wrong} as an option", _read("", f"--{section}.{wrong}=1"), names)


def _entries() -> Iterator[Case]:
    """Entries of [[training.sources]]; those of [[validation.sources]] are of the same class."""

    def read(what: str, entries: str, names: str) -> Case:
        return Case(f"sources, {what}", _read(f"training.sources = [{entries}]\n"), names)

    for name in Source.model_fields:
        kinds = alternatives(Source, name)
        wrong = {f"of type {kind}": TYPES[kind] for kind in sorted(set(TYPES) - _types(kinds))}
        if "number" in _types(kinds):
            wrong |= {value: value for value in ("0.0", "-1.0", "1e308", "nan", "inf")}
        path = "" if name == "path" else 'path = "a", '
        for what, value in wrong.items():
            entry = f"{{ {path}{name} = {value} }}"
            yield read(f"{name} {what}", entry, rf"training\.sources, entry 1: {name} = ")
    infinite = '{ path = "a", weight = 1e308 }, { path = "b", weight = 1e308 }'
    yield read("weights whose sum is infinite", infinite, r"training\.sources.*weight")
    yield read("a misspelt key", '{ path = "a", wieght = 1.0 }', "did you mean weight")


def _options() -> Iterator[Case]:
    words = {
        "an empty name": ("--=5", r"option"),
        "a name of dots": ("--..=5", r"no such section"),
    }
    for name, (option, names) in words.items():
        yield Case(f"options: {name}", _read("", option), names)
    twice = ["run.toml", "--ranks", "1", "--ranks=2"]
    action = functools.partial(read_command, config_parser("estimate", ""), twice)
    yield Case("options: of a command, twice", lambda _: action, "--ranks: given twice")
