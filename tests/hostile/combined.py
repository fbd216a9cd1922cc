"""Several faults at once: each is reported once, as it would be alone, and none causes another report or crashes the check."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.judge import Case
from tests.hostile.keys import ALTERNATIVES, FIELDS, as_option, other, toml
from tests.unit.test_checks import CASES, files
from titanlite.config import effects
from titanlite.config.read import KEYS, Faults, read_config, toml_value
from titanlite.registry.family import family_names
from titanlite.tools.check import check_here

_RELATED, _PAIRS, _TRIPLES = 10, 8, 6
_RANKS = (1, 2, 4, 8, 12)
# Values that the schema accepts, but a check of several keys, or of the model, refuses.
_MORE: dict[str, tuple[Any, ...]] = {
    "model.name": (*family_names(), "nowhere", "blocks", "my.own"),
    "model.hf_assets_path": ("nowhere", "broken"),
    "training.dataset_path": ("nowhere", "file.txt", "nowhere"),
    "validation.dataset_path": ("nowhere", "file.txt", "nowhere"),
    "job.dump_folder": ("file.txt", "file.txt/new"),
    "lora.modules": (["layers.0.*"], ["nowhere"]),
    "optimizer.decay_parameters": ("w[", "nowhere"),
    "compile.backend": ("eager", "nowhere"),
}
_OVERRIDES = ("{ n_heads = 6 }", "{ dimm = 7 }", "{ n_layers = 1 }", "{ vocab_size = 100 }")


def values(key: str) -> Iterator[str]:
    """Values of a key as TOML: each choice, both bounds, some between, and values that the schema refuses."""
    yield other(key)
    for each in ALTERNATIVES[key]:
        if "enum" in each:
            yield from map(json.dumps, each["enum"])
        elif each["type"] in ("integer", "number"):
            small, large = each.get("minimum", 1e-3), each.get("maximum", 1e9)
            between = [number for number in (2, 3, 7, 8, 12) if small <= number <= large]
            yield from (repr(number) for number in (small, large, *between))
            yield "-7"
        elif each["type"] == "boolean":
            yield from ("true", "false")
    yield from map(json.dumps, _MORE.get(key, ()))
    yield from _OVERRIDES if key == "model.overrides" else ()
    yield '"of words"'


# One key with one value each, and cases of several keys from tests/unit/test_checks.py: the schema refuses few of those.
SINGLE = [{key: value} for key in KEYS for value in dict.fromkeys(values(key))]
UNKNOWN = [{"compile.unit": "7"}, {"model.converters": '["float8"]'}, {"quantize.linear.float8.filter_fqns": "[]"}]
SEVERAL = [{key: toml_value(value) for key, value in wrong.items()} for _, wrong, _, _ in CASES]


def faults(settings: dict[str, str], ranks: int, local_ranks: int | None, options: bool = False) -> list[str]:
    """What `titanlite check` prints of a file, or of options."""
    Path("run.toml").write_text("" if options else toml(settings))
    words = [f"--{key}={as_option(value)}" for key, value in settings.items()] if options else []
    try:
        config = read_config("run.toml", words)
        check_here(config, "run.toml", ranks, local_ranks)
    except Faults as error:
        return error.faults
    return []


def _case(parts: list[dict[str, str]], ranks: int, local_ranks: int | None, options: bool) -> Case:
    settings = {key: value for part in parts for key, value in part.items()}

    def action() -> None:
        found = faults(settings, ranks, local_ranks, options)
        assert len(found) == len(set(found)), f"twice: {found}"
        alone = [faults(part, ranks, local_ranks, options) for part in parts]
        refused = {key for part, its in zip(parts, alone, strict=True) if its and len(part) == 1 for key in part}
        for fault in set(found).difference(*alone):
            assert any(key in fault for key in settings), f"of keys that were not given: {fault}"
            unless = fault.partition(": has no effect unless ")[2]
            assert not any(key in refused for key in decides(unless)), f"because of another fault: {fault}"

    def make(folder: Path) -> Callable[[], object]:
        files(folder)
        return action

    text = "; ".join(", ".join(f"{key} = {value}" for key, value in part.items()) for part in parts)
    name = f"{ranks} ranks, {local_ranks} here{', options' if options else ''}: {text}"
    return Case(name[:250], make, "", right=True)


def decides(condition: str) -> list[str]:
    """The keys that decide whether a condition holds."""
    return effects.keys_of(condition) if condition else []


def related() -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """A key of each condition, with each value of each key that decides about it."""
    found = {condition: key for key, field in FIELDS.items() for condition in effects.effective_when(field).conditions}
    for condition, key in found.items():
        for switch in decides(condition):
            for value in dict.fromkeys(values(switch)):
                yield {key: other(key)}, {switch: value}


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(f"combined {seed}")
    every = [list(pair) for pair in draw.sample([*related()], _RELATED)]
    for count, number in ((2, _PAIRS), (3, _TRIPLES)):
        every += [[draw.choice(draw.choice((SINGLE, SEVERAL, UNKNOWN))) for _ in range(count)] for _ in range(number)]
    drawn = (_case(parts, ranks := draw.choice(_RANKS), draw.choice((None, ranks)), draw.random() < 0.5) for parts in every)
    yield from {case.name: case for case in drawn}.values()
