"""A configuration check, and its subject: everything that is known about a run before any process starts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.registry.family import Family, location_of


@dataclass
class Subject:
    """What is checked. `family` and `model` are set once the checks of these names have passed."""

    config: Config
    ranks: int
    local_ranks: int | None  # the ranks on this machine; None: the run is on another machine
    open_files: bool
    family: Family = field(init=False)
    model: Decoder = field(init=False)  # on the meta device


Faults = Callable[[Subject], Iterable[str]]


class Check(NamedTuple):
    """A part's faults. needs: the checks that must pass first; without them it would fail or repeat their faults."""

    name: str
    faults: Faults
    needs: tuple[str, ...] = ()


def of_module(part: Faults) -> Faults:
    """Wraps a check that runs the user's model code: an exception there becomes a fault."""

    def faults(subject: Subject) -> Iterator[str]:
        try:
            yield from part(subject)
        except UserError as error:  # several lines where patterns of lora.modules match nothing
            yield from str(error).splitlines()
        except Exception as error:  # the user's module can raise anything
            yield f"model.name = {subject.config.model.name!r}: its code failed ({location_of(error)}): {error!r}"

    return faults
