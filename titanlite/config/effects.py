"""Conditions under which keys have an effect, which the schema declares beside each key; and what becomes of keys without.

A condition is written as it is shown to the user: "checkpoint.enable = true", "dataloader.workers > 0",
"validation.sample_prompts is set", one of the sentences below, or several of these joined by " or ".
"""

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from titanlite.ground.errors import MachineFault


class ConfigLayer(NamedTuple):
    """What has set a key."""

    number: int  # bases have negative numbers, the file 0
    name: str = ""  # for messages


FILE, OPTION, UNSET = ConfigLayer(0), ConfigLayer(1, "option"), ConfigLayer(-(2**63))


class Hardware(NamedTuple):
    """What a configuration does not say about a run. None: unknown, and conditions on it count as fulfilled."""

    cuda: bool | None = None
    ranks: int | None = None


class _Sentence(NamedTuple):
    """A condition that is no comparison of one key."""

    holds: Callable[[Any, Hardware], bool]
    keys: tuple[str, ...]  # on which it depends
    of_hardware: bool = True  # whether it depends on the hardware too


CUDA = "the machine has a GPU with CUDA"
RANKS = "the run has more than one rank"
ACCUMULATION = "a step has more than one microbatch"
DECAY = "the learning rate decays"
_OF_MESH = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel")


def _decays(config: Any) -> bool:
    """Whether a schedule has a decay. Without total_steps, it may be longer than training.steps, which a resume has lowered."""
    cfg = config.lr_scheduler
    return cfg.decay_ratio != 0 and (not cfg.total_steps or config.decay_steps > 0)


_SENTENCES = {
    CUDA: _Sentence(lambda _, hardware: hardware.cuda is not False, ()),
    RANKS: _Sentence(lambda _, hardware: hardware.ranks is None or hardware.ranks > 1, ()),
    ACCUMULATION: _Sentence(
        lambda config, hardware: hardware.ranks is None or config.accumulates(hardware.ranks),
        ("training.global_batch_size", "training.local_batch_size", *(f"parallelism.{name}_degree" for name in _OF_MESH)),
    ),
    DECAY: _Sentence(
        lambda config, _: _decays(config),
        ("lr_scheduler.decay_ratio", "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "training.steps"),
        of_hardware=False,
    ),
}
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "has": operator.contains,
}


class EffectiveWhen:
    """Annotates a key: it has an effect only when all conditions hold."""

    def __init__(self, *conditions: str):
        self.conditions = conditions

    def and_when(self, *conditions: str) -> "EffectiveWhen":
        """These conditions too."""
        return EffectiveWhen(*self.conditions, *conditions)

    def failing(self, config: BaseModel, hardware: Hardware) -> str | None:
        """The first condition that does not hold, or None."""
        return next((condition for condition in self.conditions if not _holds(condition, config, hardware)), None)


ALWAYS = EffectiveWhen()


def effective_when(field: FieldInfo) -> EffectiveWhen:
    """The conditions of a key. Raises TypeError for a key that declares none: `Section` calls this for each."""
    rules = [rule for rule in field.metadata if isinstance(rule, EffectiveWhen)]
    if len(rules) != 1:
        raise TypeError("each key has one EffectiveWhen among its annotations, or ALWAYS")
    return rules[0]


class Idle(NamedTuple):
    """A key without effect."""

    section: str
    name: str
    value: Any
    default: Any
    condition: str  # that does not hold
    layer: ConfigLayer  # that has set it
    off: ConfigLayer  # that has switched it off

    @property
    def refused(self) -> bool:
        """Whether the key is refused: whoever set it could see that it has no effect. Not so for a file on another machine or
        number of ranks, nor for a key at its default."""
        if self.value == self.default:
            return False
        hardware = any(part in _SENTENCES and _SENTENCES[part].of_hardware for part in self.condition.split(" or "))
        return self.layer.number >= (OPTION.number if hardware else self.off.number)

    def __str__(self) -> str:
        setting = f"{self.section}.{self.name} = {json.dumps(self.value, default=str)}"
        return f"{setting}{f' ({self.layer.name})' if self.layer.name else ''}: has no effect unless {self.condition}"


def idle(config: BaseModel, hardware: Hardware, layers: dict[str, ConfigLayer]) -> Iterator[Idle]:
    """All keys without effect."""
    for section in type(config).model_fields:
        table = getattr(config, section)
        for name, field in type(table).model_fields.items():
            if condition := effective_when(field).failing(config, hardware):
                off = max((layers.get(key, UNSET) for key in keys_of(condition)), default=UNSET)
                layer = layers.get(f"{section}.{name}", UNSET)
                yield Idle(section, name, getattr(table, name), field.get_default(), condition, layer, off)


def faults(found: list[Idle], others: Iterable[str] = ()) -> Iterator[str]:
    """A sentence for every key that has no effect and must not be there.

    others: all other faults. Where one names a key that decides about the effect, it is not known yet.
    """
    named = {key for fault in others for key in re.findall(r"\w+\.\w+", fault)}
    for key in found:
        if key.refused and named.isdisjoint(keys_of(key.condition)):
            yield MachineFault(key) if key.condition == CUDA else str(key)


def note(found: list[Idle]) -> str:
    """One line that names all other keys that were set and have no effect; "" where there are none."""
    sentences = [str(key) for key in found if key.layer != UNSET and not key.refused]
    return f"keys without effect: {'; '.join(sentences)}" if sentences else ""


def _holds(condition: str, config: BaseModel, hardware: Hardware) -> bool:
    return any(_part_holds(part, config, hardware) for part in condition.split(" or "))


def _part_holds(part: str, config: BaseModel, hardware: Hardware) -> bool:
    if part in _SENTENCES:
        return _SENTENCES[part].holds(config, hardware)
    key, sign, *text = part.split(" ", 2)
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    if text == ["set"] or text == ["not set"]:
        return bool(value) == (text == ["set"])
    return _OPERATORS[sign](value, json.loads(text[0]))


def keys_of(condition: str) -> list[str]:
    """The keys that decide whether a condition holds."""
    parts = condition.split(" or ")
    return [key for part in parts for key in (_SENTENCES[part].keys if part in _SENTENCES else (part.split(" ")[0],))]
