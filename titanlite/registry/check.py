"""A configuration check, and its subject: everything that is known about a run before any process starts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.registry.family import Family
from titanlite.registry.own import calling


@dataclass
class Subject:
    """What is checked. `family` and `model` are set once the checks of these names have passed."""

    config: Config
    ranks: int
    local_ranks: int | None  # the ranks on this machine; None: the run is on another machine
    family: Family = field(init=False)
    model: Decoder = field(init=False)  # on the meta device


Faults = Callable[[Subject], Iterable[str]]
MayRaise = Callable[[Subject], Iterable[str] | None]  # None where the only faults are those that it raises, as a UserError


class Check(NamedTuple):
    """A part's faults. needs: the checks that must pass first; without them it would fail or repeat their faults."""

    name: str
    faults: MayRaise
    needs: tuple[str, ...] = ()


def of_module(part: MayRaise) -> Faults:
    """Wraps a check that runs the user's model code: an exception there becomes a fault."""

    def faults(subject: Subject) -> Iterator[str]:
        with calling(f"model.name = {subject.config.model.name!r}: its code failed"):
            yield from part(subject) or ()

    return faults


def found_by(part: Callable[..., Iterable[str] | None], *arguments: Any) -> Iterator[str]:
    """A part's faults. A UserError that it raises is one for each line, such as for each pattern that matches nothing."""
    try:
        yield from part(*arguments) or ()
    except UserError as error:
        yield from str(error).splitlines()
