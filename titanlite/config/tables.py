"""What every table of the configuration does: refuse unknown keys; what a resume may change."""

from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from titanlite.config import effects


class StrictModel(BaseModel):
    """Of all tables: unknown keys are refused, types are not converted, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class OnResume(NamedTuple):
    """Annotates a key: what happens if a run is resumed with another value than its checkpoint has.

    A key without it changes the mathematics of later steps, and `checkpoint.allow_changes` must name it. refused: why the old
    state cannot be combined with another value; "": the value changes no number of later steps, apart from rounding.
    """

    refused: str = ""


MAY_CHANGE = OnResume()


class Section(StrictModel):
    """Of all sections: every key says when it has an effect."""

    ON_RESUME: ClassVar[OnResume | None] = None  # of keys that have no annotation of their own

    @classmethod
    def on_resume(cls, name: str) -> OnResume | None:
        """The annotation of a key."""
        return next((rule for rule in cls.model_fields[name].metadata if isinstance(rule, OnResume)), cls.ON_RESUME)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            effects.effective_when(field)
