"""When a key has an effect: conditions that the schema declares beside the key, and the check that refuses idle keys.

A condition is written as it is shown to the user: "checkpoint.enable = true", "dataloader.workers > 0",
"validation.sample_prompts is set", or CUDA.
"""

import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

from titanlite.errors import MachineFault

CUDA = "the machine has a GPU with CUDA"

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
}


class EffectiveWhen:
    """A key has an effect only when all conditions hold. Annotates a key, or a section for all its keys but `enable`."""

    def __init__(self, *conditions: str):
        self.conditions = conditions

    def failing(self, config: BaseModel, cuda: bool) -> str | None:
        """The first condition that does not hold, or None."""
        return next((condition for condition in self.conditions if not _holds(condition, config, cuda)), None)


def faults(config: BaseModel, cuda: bool) -> Iterator[str]:
    """A sentence for every key that is not at its default and has no effect."""
    for section, table in config:
        for name, field in type(table).model_fields.items():
            value = getattr(table, name)
            rule = effective_when(type(table), name)
            if rule and value != field.default and (condition := rule.failing(config, cuda)):
                kind = MachineFault if condition == CUDA else str
                yield kind(f"{section}.{name} = {json.dumps(value)}: has no effect unless {condition}")


def effective_when(section: type[BaseModel], name: str) -> EffectiveWhen | None:
    """The conditions of a key, or else those of its whole section."""
    rules = [rule for rule in section.model_fields[name].metadata if isinstance(rule, EffectiveWhen)]
    return rules[0] if rules else getattr(section, "effective_when", None) if name != "enable" else None


def _holds(condition: str, config: BaseModel, cuda: bool) -> bool:
    if condition == CUDA:
        return cuda
    key, sign, *text = condition.split(" ", 2)
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    return bool(value) if sign == "is" else _OPERATORS[sign](value, json.loads(text[0]))
