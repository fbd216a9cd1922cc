"""Settings that exclude each other. Each part of titanlite has its table of them, and each conflict is one sentence."""

import json
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from titanlite.config.effects import EffectiveWhen, Hardware

# A setting, the other settings, joined by " and ", and why they exclude each other or what to set instead. Settings are written
# as conditions in effects.py; they conflict when all of them hold.
Conflict = tuple[str, str, str]


def conflicts(config: BaseModel, table: Iterable[Conflict]) -> Iterator[str]:
    """A sentence for every conflict of a table that a configuration has."""
    for setting, others, why in table:
        conditions = [setting, *others.split(" and ")]
        if EffectiveWhen(*conditions).failing(config, Hardware()) is None:
            first, *rest = (_value(condition, config) for condition in conditions)
            yield f"{first} with {' and '.join(rest)}: {why}"


def _value(condition: str, config: BaseModel) -> str:
    """The key of a condition with its value, such as "lora.rank = 8" for "lora.rank > 0"."""
    key = condition.split(" ")[0]
    section, name = key.split(".")
    return f"{key} = {json.dumps(getattr(getattr(config, section), name))}"
