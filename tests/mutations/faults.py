"""The faults of faults.json: where each stands in the tree, and a file with one of them in it.

A fault is found by its file and the text of its line, wherever that line has moved to and however it is indented; where the
line occurs several times, by the function or class around it (`scope`), and at last by its number among those (`nth`, from 0).
"""

import json
from pathlib import Path
from typing import NamedTuple

from tests.mutations.draw import scopes

FAULTS = Path(__file__).with_name("faults.json")


class Fault(NamedTuple):
    """A line and what stands there instead.

    id: c01 to c20 were chosen, d01 to d40 drawn by draw.py. origin: file and line at the commit of the draw. why: of a chosen
    one, what it does. tests: of the suite as it is, what is tried first, cheap ones first. rewritten: the line of the draw,
    where the code has been rewritten since and the fault was expressed again at the same place.
    """

    id: str
    file: str
    origin: str
    line: str
    fault: str
    kind: str = "chosen"
    why: str = ""
    scope: str | None = None
    nth: int = 0
    tests: tuple[str, ...] = ()
    rewritten: str = ""


def read_faults() -> list[Fault]:
    return [Fault(**entry) for entry in json.loads(FAULTS.read_text(encoding="utf-8"))["faults"]]


def place(source: str, fault: Fault) -> int:
    """The number of a fault's line, from 0. Raises LookupError where it is not there, or there more than once."""
    found = [number for number, line in enumerate(source.split("\n")) if line.strip() == fault.line]
    if fault.scope is not None:
        names = scopes(source)
        found = [number for number in found if names[number] == fault.scope][fault.nth : fault.nth + 1]
    if len(found) != 1:
        raise LookupError(f"{fault.id}: {fault.file} has {len(found)} times the line {fault.line!r}")
    return found[0]


def with_fault(source: str, fault: Fault) -> str:
    """A file's text with the fault in it."""
    lines = source.split("\n")
    number = place(source, fault)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = indent + fault.fault
    return "\n".join(lines)
