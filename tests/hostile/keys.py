"""Wrong keys: every key of the schema x {wrong type, out of bounds on each side, no effect, given twice, misspelt}."""

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
from titanlite.loop.checks import check
from titanlite.tools.options import config_parser, read_command

FIELDS: dict[str, FieldInfo] = {key: SECTIONS[key.split(".")[0]].model_fields[key.split(".")[1]] for key in KEYS}
# A value of each type of TOML, by its name in a JSON schema.
TYPES = {
    "string": '"seven"',
    "integer": "7",
    "number": "7.5",
    "boolean": "true",
    "array": "[[7]]",
    "object": "{ a = 7 }",
    "date": "2020-02-02",
}
# Keys, and what must be set so that a condition holds; without it the condition does not hold.
HOLDS: dict[str, dict[str, str]] = {
    "checkpoint.enable = true": {"checkpoint.enable": "true"},
    "checkpoint.initial_load_path is set": {"checkpoint.initial_load_path": '"weights"'},
    "lora.enable = true": {"lora.enable": "true"},
    "float8.enable = true": {"float8.enable": "true"},
    "compile.enable = true": {"compile.enable": "true"},
    'optimizer.name = "Muon"': {"optimizer.name": '"Muon"'},
    "validation.enable = true": {"validation.enable": "true"},
    "validation.sample_prompts is set": {"validation.sample_prompts": '["a"]'},
    "parallelism.tensor_parallel_degree > 1": {"parallelism.tensor_parallel_degree": "2"},
    "parallelism.context_parallel_degree > 1": {"parallelism.context_parallel_degree": "2"},
    "parallelism.expert_parallel_degree > 1": {"parallelism.expert_parallel_degree": "2"},
    "parallelism.pipeline_parallel_degree > 1": {"parallelism.pipeline_parallel_degree": "2"},
    "model.hf_assets_path is set": {"model.hf_assets_path": '"assets"'},
    "dataloader.workers > 0": {"dataloader.workers": "1"},
    "profiling.enable_profiling = true": {"profiling.enable_profiling": "true"},
    "profiling.enable_memory_snapshot = true": {"profiling.enable_memory_snapshot": "true"},
    "profiling.enable_profiling = true or profiling.enable_memory_snapshot = true": {"profiling.enable_profiling": "true"},
    'training.dtype = "bfloat16"': {"training.dtype": '"bfloat16"'},
    'activation_checkpoint.mode = "full"': {"activation_checkpoint.mode": '"full"'},
    'activation_checkpoint.mode = "selective"': {"activation_checkpoint.mode": '"selective"'},
    'activation_checkpoint.mode = "memory_budget"': {"activation_checkpoint.mode": '"memory_budget"'},
}
# Conditions that hold by default, and what must be set so that they do not.
FAILS: dict[str, dict[str, str]] = {
    "metrics.enable_tensorboard = true": {"metrics.enable_tensorboard": "false"},
    "metrics.spike_window > 0": {"metrics.spike_window": "0"},
    "parallelism.pipeline_parallel_degree = 1": {
        "parallelism.pipeline_parallel_degree": "2",
        "training.local_batch_size": "1",
        "training.global_batch_size": "2",
    },
    "checkpoint.keep_latest_k > 0": {"checkpoint.keep_latest_k": "0"},
    "optimizer.weight_decay > 0": {"optimizer.weight_decay": "0.0"},
    'training.document_policy != "truncate"': {"training.document_policy": '"truncate"'},
    'compile.components has "model"': {"compile.components": '["loss"]'},
    'compile.backend = "inductor"': {"compile.backend": '"eager"'},
    effects.DECAY: {"lr_scheduler.decay_ratio": "0.0"},
    **{
        f"{section}.{name} is not set": {f"{section}.{name}": value}
        for section in ("training", "validation")
        for name, value in (("dataset_path", '"text"'), ("sources", '[{ path = "text" }]'))
    },
}
OF_THE_PLACE = (effects.CUDA, effects.RANKS, effects.ACCUMULATION)
# Values of keys for which no other can be derived from the schema.
OTHERS = {"model.overrides": "{ dim = 64 }", "checkpoint.load_step": "3", "training.sources": '[{ path = "text" }]'}
OTHERS["validation.sources"] = OTHERS["training.sources"]


def cases(seed: int) -> Iterator[Case]:
    """Every wrong key; the seed chooses between wrong types, and where a misspelt key is wrong."""
    draw = random.Random(seed)
    for key in KEYS:
        yield from _wrong_types(key, draw)
        yield from _out_of_bounds(key)
        yield from _without_effect(key)
        yield from _twice(key)
        yield from _misspelt(key, draw)
    yield from _entries()
    yield from _layers()
    yield from _options()


# --------------------------------------------------------------------------------------------------- files and options


def toml(settings: dict[str, str], base: str = "") -> str:
    """A file with these settings. base: the name of another one."""
    head = [f'base = "{base}"'] if base else []
    return "\n".join([*head, *(f"{key} = {value}" for key, value in settings.items()), ""])


def _read(text: str, *options: str) -> Callable[[Path], Callable[[], object]]:
    """Reads a configuration as a command does."""

    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text(text, encoding="utf-8")
        return lambda: read_words(["run.toml", *options], "")

    return make


def _check(text: str, *options: str, base: str = "", right: str = "") -> Callable[[Path], Callable[[], object]]:
    """Reads and checks a run on one rank, or on two stages, as a rank does at its start.

    base: the text of base.toml. right: it is accepted, and the line on keys without effect has these words.
    """

    def action() -> None:
        config = read_config("run.toml", list(options))
        check(config, "run.toml", 2 if config.parallelism.pipeline_parallel_degree == 2 else 1, open_files=False)
        note = effects.note(config.idle(effects.Place(False, 1)))
        assert not right or re.search(right, note), f"the line at the start does not name {right!r}: {note!r}"

    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text(text, encoding="utf-8")
        (folder / "base.toml").write_text(base, encoding="utf-8")
        return action

    return make


def _of_file_and_option(key: str, name: str, value: str) -> Iterator[Case]:
    """A wrong value, in a file and as an option."""
    names = rf"{re.escape(key)} = .*must be "
    yield Case("keys", f"{key} {name} in a file", _read(toml({key: value})), names)
    yield Case("keys", f"{key} {name} as an option", _read("", f"--{key}={value}"), names)


# ------------------------------------------------------------------------------------------------------ types and bounds


def alternatives(table: type[BaseModel], name: str) -> list[dict[str, Any]]:
    """The JSON schemas of the alternatives of a key."""
    kind = table.model_json_schema()["properties"][name]
    return list(kind.get("anyOf", [kind]))


ALTERNATIVES = {key: alternatives(SECTIONS[key.split(".")[0]], key.split(".")[1]) for key in KEYS}


def _types(kinds: list[dict[str, Any]]) -> set[str]:
    found = {each["type"] for each in kinds}
    return found | ({"integer"} if "number" in found else set())  # TOML writes 1 for 1.0


def _wrong_types(key: str, draw: random.Random) -> Iterator[Case]:
    wrong = sorted(set(TYPES) - _types(ALTERNATIVES[key]))
    for kind in draw.sample(wrong, min(4, len(wrong))):
        text = toml({key: TYPES[kind]})
        yield Case("keys", f"{key} of type {kind}", _read(text), rf"{re.escape(key)}\b")
    if not {"string", "array", "object"} & _types(ALTERNATIVES[key]):
        yield from list(_of_file_and_option(key, "of words", '"a b"'))[1:]
    if values := next((each["enum"] for each in ALTERNATIVES[key] if "enum" in each), None):
        yield from _of_file_and_option(key, "of another case", f'"{str(values[0]).swapcase()}"')


def _out_of_bounds(key: str) -> Iterator[Case]:
    make = functools.partial(_of_file_and_option, key)
    for each in ALTERNATIVES[key]:
        kind = each["type"] if "const" not in each else ""
        if kind in ("integer", "number"):
            least, most = each.get("minimum", each.get("exclusiveMinimum")), each.get("maximum", each.get("exclusiveMaximum"))
            assert least is not None and (most is not None or key == "training.max_norm"), f"{key} has no bounds on both sides"
            below, far = (least - 3, -(10**20)) if kind == "integer" else (least - 1e-3, -1e308)
            values = {"below": below, "far below": far}
            if most is not None:
                values |= (
                    {"above": most + 1, "far above": 10**20} if kind == "integer" else {"above": most * 1.1, "far above": 1e308}
                )
            for name, value in values.items():
                yield from make(f"{name} its bounds", repr(value))
            if kind == "number":
                yield from make("not a number", "nan")
        if "maxLength" in each:
            yield Case("keys", f"{key} too long", _read(toml({key: json.dumps("a" * 1001)})), rf"{re.escape(key)}\b")
            yield Case("keys", f"{key} with NUL", _read(toml({key: '"a\\u0000b"'})), rf"{re.escape(key)}\b")
        if "minItems" in each:
            yield Case("keys", f"{key} empty", _read(toml({key: "[]"})), rf"{re.escape(key)}\b")


def _of_command(*words: str) -> Callable[[Path], Callable[[], object]]:
    """Reads the words of `titanlite estimate`."""

    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text("")
        return lambda: read_command(config_parser("estimate"), ["run.toml", *words])

    return make


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


def of_the_place(condition: str) -> bool:
    """Whether it depends on the device or on the number of ranks."""
    return any(part in OF_THE_PLACE for part in condition.split(" or "))


def setting(key: str, condition: str) -> dict[str, str]:
    """The key with a value of its own, where this condition does not hold and all its others do."""
    settings: dict[str, str] = {}
    for each in effects.effective_when(FIELDS[key]).conditions:
        if not of_the_place(each) and (each == condition) == (each in FAILS):
            settings |= FAILS[each] if each in FAILS else HOLDS[each]
    return settings | {key: other(key)}


def _without_effect(key: str) -> Iterator[Case]:
    for condition in effects.effective_when(FIELDS[key]).conditions:
        settings = setting(key, condition)
        names = rf"{re.escape(key)} = .*has no effect unless {re.escape(condition)}"
        given = settings.pop(key)
        option = f"--{key}={as_option(given)}"
        yield Case("keys", f"{key} as an option unless {condition}", _check(toml(settings), option), names)
        if of_the_place(condition):
            in_file = _read_and_note(toml(settings | {key: given}), names)
            yield Case("keys", f"{key} in a file unless {condition}", in_file, names, right=True)
        else:
            yield Case("keys", f"{key} in a file unless {condition}", _check(toml(settings | {key: given})), names)


def _read_and_note(text: str, words: str) -> Callable[[Path], Callable[[], object]]:
    """Reads a file on a machine without a GPU, with one rank: a line names the key, which is then at its default."""

    def action() -> None:
        config = read_config("run.toml", [])
        idle, place = config.idle(effects.Place(False, 1)), effects.Place(False, 1)
        assert list(effects.faults(idle)) == []
        assert re.search(words, effects.note(idle)), effects.note(idle)
        assert not any(key.value != key.default for key in config.settled(place).idle(place))

    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text(text, encoding="utf-8")
        return action

    return make


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
        yield Case("keys", f"a feature that {name} switches off later", make, names, right=True)
    same = {
        "a base": _check(toml({}, "base.toml"), base=toml(on | off)),
        "a file": _check(toml(on | off)),
        "a file over its base": _check(toml({"validation.freq": "7"}, "base.toml"), base=toml(off)),
        "options": _check(toml(on), "--validation.enable=false", "--validation.freq=7"),
        "an option over a file": _check(toml(off), "--validation.freq=7"),
    }
    for name, make in same.items():
        yield Case("keys", f"a feature that is off, and its key of {name}", make, names)


# ----------------------------------------------------------------------------------------------- twice, misspelt, others


def _twice(key: str) -> Iterator[Case]:
    value = as_option(other(key))
    dashes = key.replace("_", "-")
    yield Case("keys", f"{key} twice", _read("", f"--{key}={value}", f"--{key}={value}"), rf"--{re.escape(key)}: given twice")
    yield Case("keys", f"{key} twice, apart", _read("", f"--{key}", value, f"--{dashes}", value), "given twice")


def _misspelt(key: str, draw: random.Random) -> Iterator[Case]:
    section, name = key.split(".")
    for wrong in (name[: (place := draw.randrange(len(name)))] + name[place + 1 :], name + name[-1]):
        if not wrong or f"{section}.{wrong}" in KEYS:
            continue
        names = rf"{re.escape(section)}\.{re.escape(wrong)}\b.*(no such key|not a key)"
        yield Case("keys", f"{key} misspelt {wrong} in a file", _read(toml({f"{section}.{wrong}": "1"})), names)
        yield Case("keys", f"{key} misspelt {wrong} as an option", _read("", f"--{section}.{wrong}=1"), names)


def _entries() -> Iterator[Case]:
    """Entries of [[training.sources]] and [[validation.sources]]."""
    for section in ("training", "validation"):
        for name in Source.model_fields:
            kinds = alternatives(Source, name)
            place = rf"{section}\.sources, entry 1: {name} = "

            def entry(what: str, value: str, section: str = section, name: str = name, place: str = place) -> Iterator[Case]:
                path = "" if name == "path" else 'path = "a", '
                text = f"{section}.sources = [{{ {path}{name} = {value} }}]\n"
                yield Case("keys", f"{section}.sources, {name} {what}", _read(text), place)

            for kind in sorted(set(TYPES) - _types(kinds)):
                yield from entry(f"of type {kind}", TYPES[kind])
            yield from _out_of_bounds_of_entry(kinds, entry)
        twice = f'{section}.sources = [{{ path = "a", weight = 1e308 }}, {{ path = "b", weight = 1e308 }}]\n'
        yield Case(
            "keys", f"{section}.sources with weights that add up to infinity", _read(twice), rf"{section}\.sources.*weight"
        )
        misspelt = f'{section}.sources = [{{ path = "a", wieght = 1.0 }}]\n'
        yield Case("keys", f"{section}.sources with a misspelt key", _read(misspelt), "did you mean weight")


def _out_of_bounds_of_entry(kinds: list[dict[str, Any]], make: Callable[[str, str], Iterator[Case]]) -> Iterator[Case]:
    numbers = [each for each in kinds if each["type"] == "number"]
    for value in ("0.0", "-1.0", "1e308", "nan", "inf") if numbers else ():
        yield from make(f"of {value}", value)


def _options() -> Iterator[Case]:
    """What the issue names, and other words that are no options."""
    adapters = {"lora.enable": "true", "lora.rank": "1000"}
    yield Case("keys", "adapters of a higher rank than the matrix", _check(toml(adapters)), r"lora\.rank = 1000.*layers\.")
    blocks = {"activation_checkpoint.mode": '"selective"', "activation_checkpoint.selective_ac_option": "99"}
    yield Case("keys", "every 99th of a few blocks", _check(toml(blocks)), r"selective_ac_option = 99")
    short = {"lr_scheduler.decay_ratio": "0.001", "training.steps": "300"}
    yield Case("keys", "a decay of less than a step", _check(toml(short)), r"lr_scheduler\.decay_ratio = 0\.001")
    words = {
        "no option": (["stray"], "stray: belongs to no option"),
        "no value": (["--training.steps"], r"--training\.steps: has no value"),
        "no section": (["--steps", "5"], r"did you mean training\.steps"),
        "5,000 digits": ([f"--training.steps={'9' * 5000}"], r"training\.steps"),
        "5,000 levels": ([f"--model.overrides={'[' * 5000}"], r"model\.overrides"),
        "an empty name": (["--=5"], r"option"),
        "a name of dots": (["--..=5"], r"no such section"),
    }
    for name, (options, names) in words.items():
        yield Case("keys", f"options: {name}", _read("", *options), names)
    yield Case("keys", "options: of a command, twice", _of_command("--ranks", "1", "--ranks=2"), "--ranks: given twice")
    assert set(HOLDS) | set(FAILS) | set(OF_THE_PLACE) >= {
        condition
        for field in FIELDS.values()
        for condition in effects.effective_when(field).conditions
        if not of_the_place(condition)
    }
