"""`model.overrides`: changes dimensions of a flavor. Names, types and bounds are those of the family's own Config.

A table changes a nested dataclass or NamedTuple, such as Llama's rope_scaling, whose rope_type selects one of several. TOML has
no null, so "none" means None in a field that can be None.
"""

import inspect
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from models.rope import SCALINGS
from titanlite.config.read import suggest
from titanlite.ground.errors import UserError, allowed


def overridden(base: Any, overrides: dict[str, Any], flavors: Sequence[Any], family: str) -> Any:
    """The Config `base` with the values of `overrides`. flavors: all of the family, which determine the bounds of numbers.

    Raises UserError that lists all faults, one per line.
    """
    return _changed(type(base), base, overrides, flavors, "model.overrides", family) if overrides else base


def _changed(kind: Any, base: Any, table: dict[str, Any], flavors: Sequence[Any], key: str, owner: str) -> Any:
    """A `kind` with the values of `table`, the others from `base`, if that is not None. Raises UserError with all faults."""
    hints, parameters, faults = typing.get_type_hints(kind), inspect.signature(kind).parameters, []
    names = list(parameters)
    own = fields(kind) if is_dataclass(kind) else ()
    least = {each.name: each.metadata["least"] for each in own if "least" in each.metadata}
    values = {} if base is None else {name: getattr(base, name) for name in names}
    for name, value in table.items():
        if name not in names:
            hint = suggest(name, names, f"{key}.")
            faults.append(f"{key}.{name} = {json.dumps(value)}: {owner} has no such dimension{hint}")
            continue
        known = [getattr(flavor, name) for flavor in flavors if isinstance(flavor, kind)]
        known += [least[name]] if name in least else []
        try:
            values[name] = _value(hints[name], values.get(name), value, known, f"{key}.{name}")
        except UserError as error:
            faults.append(str(error))
    required = [name for name, each in parameters.items() if each.default is each.empty]
    if missing := [name for name in required if name not in {**values, **table}]:
        faults.append(f"{key}: lacks {', '.join(missing)}, and the flavor has no {owner} to take them from")
    if faults:
        raise UserError("\n".join(faults))
    try:
        return kind(**values)
    except (ValueError, TypeError, AssertionError) as error:  # raised by the family's __post_init__
        raise UserError(f"{key}: {owner} refuses these dimensions: {error!r}") from None


def _value(hint: Any, base: Any, value: Any, known: list[Any], key: str) -> Any:
    """A value in the type of its field. base: that of the flavor; known: those of all flavors."""
    shown, alternatives = f"{key} = {json.dumps(value)}: ", _alternatives(hint)
    if type(None) in alternatives and str(value).lower() == "none":
        return None
    structures = [each for each in alternatives if _is_structure(each)]
    if len(structures) > 1:
        value = dict(value) if isinstance(value, dict) else {"rope_type": value}
        kind: Any = type(base)
        if "rope_type" in value:  # another scaling as a whole, even if it is of the same type
            kind, base = SCALINGS.get(str(value.pop("rope_type"))), None
        if kind not in structures:
            raise UserError(f'{shown}must be "none", or a table whose rope_type is one of {", ".join(SCALINGS)}')
        structures = [kind]
    if structures and isinstance(value, dict):
        [kind] = structures
        return _changed(kind, base if isinstance(base, kind) else None, value, known, key, kind.__name__)
    try:
        # Validated as JSON, where a list may fill a field that is a tuple.
        found = TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except PydanticSchemaGenerationError:
        raise UserError(f"{shown}TOML has no values of type {hint}; add a flavor to the family's file instead") from None
    except ValidationError as error:
        raise UserError(f"{shown}must be {allowed(error.errors())}") from None
    if _is_number(found) and found not in known:
        # A flavor that has 0 or -1, or `least` in the field's metadata, shows that the family gives it a meaning.
        least = min(filter(_is_number, known), default=1)
        if isinstance(found, float) and found and not 1e-30 <= abs(found) <= 1e30:
            raise UserError(f"{shown}must be a number that float32 can be multiplied with, from 1e-30 to 1e30")
        if found <= 0 and found < least:
            raise UserError(shown + "must be " + ("greater than 0" if least > 0 else f"at least {least}"))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_structure(kind: Any) -> bool:
    """Whether a type is a dataclass or a NamedTuple."""
    return isinstance(kind, type) and (is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")))
