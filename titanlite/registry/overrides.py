"""`model.overrides`: a flavor with other dimensions. Names, types and bounds are those of the family's own Config.

Tables reach into nested dataclasses and NamedTuples, such as Llama's rope_scaling, whose rope_type chooses one of several. TOML
has no null, so "none" stands for None in a field that can be None.
"""

import inspect
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from models.rope import SCALINGS
from titanlite.config.read import suggest
from titanlite.ground.errors import UserError, allowed


def overridden(base: Any, overrides: dict[str, Any], flavors: Sequence[Any], family: str) -> Any:
    """The Config `base` with the values of `overrides`. flavors: all of the family; bounds of numbers follow from them.

    Raises UserError that lists all faults, one a line.
    """
    if not overrides:
        return base
    faults: list[str] = []
    config = _changed(type(base), base, overrides, flavors, "model.overrides", family, faults)
    if faults:
        raise UserError("\n".join(faults))
    return config


def _changed(
    kind: Any, base: Any, table: dict[str, Any], flavors: Sequence[Any], key: str, owner: str, faults: list[str]
) -> Any:
    """A `kind` with the values of `table`, the others from `base`, if that is not None. Adds to `faults`."""
    hints, parameters, before = typing.get_type_hints(kind), inspect.signature(kind).parameters, len(faults)
    values = {} if base is None else {name: getattr(base, name) for name in parameters}
    for name, value in table.items():
        inside = f"{key}.{name}"
        if name not in parameters:
            hint = suggest(name, list(parameters), f"{key}.")
            faults.append(f"{inside} = {json.dumps(value)}: {owner} has no such dimension{hint}")
            continue
        known = [getattr(flavor, name) for flavor in flavors if isinstance(flavor, kind)]
        structures = [each for each in _alternatives(hints[name]) if _is_structure(each)]
        if len(structures) > 1 and str(value).lower() != "none":
            values[name] = _chosen(structures, values.get(name), value, known, inside, faults)
        elif structures and isinstance(value, dict):
            [structure] = structures
            values[name] = _changed(structure, values.get(name), value, known, inside, structure.__name__, faults)
        else:
            values[name] = _validated(hints[name], value, known, inside, faults)
    if missing := [name for name, each in parameters.items() if name not in values and each.default is each.empty]:
        faults.append(f"{key}: has no {', '.join(missing)}; the flavor has no {owner} to take them from")
    if len(faults) > before:
        return None
    try:
        return kind(**values)
    except (ValueError, TypeError, AssertionError) as error:  # of the family's __post_init__
        faults.append(f"{key}: {owner} refuses these dimensions: {error!r}")
        return None


def _chosen(structures: Sequence[Any], base: Any, value: Any, known: list[Any], key: str, faults: list[str]) -> Any:
    """One of several structures: that of the table's rope_type, or of `base`, with the other values of the table."""
    kinds = {name: kind for name, kind in SCALINGS.items() if kind in structures}
    table = dict(value) if isinstance(value, dict) else {"rope_type": value}
    named = table.pop("rope_type", next((name for name, kind in kinds.items() if isinstance(base, kind)), None))
    if not isinstance(named, str) or named not in kinds:
        faults.append(f'{key} = {json.dumps(value)}: must be "none", or a table whose rope_type is one of {", ".join(kinds)}')
        return None
    kind = kinds[named]
    return _changed(kind, base if isinstance(base, kind) else None, table, known, key, kind.__name__, faults)


def _validated(hint: Any, value: Any, known: list[Any], key: str, faults: list[str]) -> Any:
    """The value in the type of its field. known: the values of the family's flavors."""
    shown = f"{key} = {json.dumps(value)}"
    if type(None) in _alternatives(hint) and isinstance(value, str) and value.lower() == "none":
        return None
    try:
        # Read as JSON, which like TOML has lists where a field may have a tuple.
        found = TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except PydanticSchemaGenerationError:
        faults.append(f"{shown}: TOML has no values of type {hint}; add a flavor to the family's file instead")
        return None
    except ValidationError as error:
        faults.append(f"{shown}: must be {allowed(list(error.errors()))}")
        return None
    if _is_number(found):
        # A flavor that has 0 or -1 shows that the family gives it a meaning.
        least = min(filter(_is_number, known), default=1)
        if not math.isfinite(found) and found not in known:
            faults.append(f"{shown}: must be a finite number")
        elif isinstance(found, float) and found and not 1e-30 <= abs(found) <= 1e30 and found not in known:
            faults.append(f"{shown}: must be a number that float32 can be multiplied with, from 1e-30 to 1e30")
        elif found <= 0 and found < least:
            faults.append(f"{shown}: must be " + ("greater than 0" if least > 0 else f"at least {least}"))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_structure(kind: Any) -> bool:
    """Whether a type is a dataclass or a NamedTuple."""
    return isinstance(kind, type) and (is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")))
