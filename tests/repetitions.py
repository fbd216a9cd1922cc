"""Which cases of a table run in `make test`, and which only in `make test-all`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def one_of_each(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of cases that together show every value that any of them shows."""
    seen: set[tuple[str, str]] = set()
    names = []
    for name, case in cases.items():
        values = {(key, repr(value)) for key, value in case.items()}
        if not seen.issuperset(values):
            seen |= values
            names.append(name)
    return names


def slow_but(kept: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names, of which all that are not kept are marked slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
