"""What every table of the configuration does: refuse unknown keys, and note which key was read last."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from titanlite.config import effects
from titanlite.errors import LAST_READ

KEYS: dict[tuple[type, str], str] = {}  # (section, field) -> "section.key"; schema.py fills it


class Table(BaseModel):
    """Of all tables: unknown keys are refused, types are not converted, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    if not TYPE_CHECKING:  # where it would give every attribute the type Any

        def __getattribute__(self, name: str) -> Any:
            """Notes the key for the report of an exception."""
            if key := KEYS.get((type(self), name)):
                LAST_READ["key"] = key
            return super().__getattribute__(name)


class Section(Table):
    """Of all sections: every key says when it has an effect."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            effects.effective_when(field)
