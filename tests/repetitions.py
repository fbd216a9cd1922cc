"""Selects the cases of a table that run in `make test`; the others run only in `make test-all`."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def one_of_each(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of cases that together have every value that any of them has."""
    seen: set[tuple[str, str]] = set()
    names = []
    for name, case in cases.items():
        values = {(key, repr(value)) for key, value in case.items()}
        if not seen.issuperset(values):
            seen |= values
            names.append(name)
    return names


def in_turn(first: Sequence[str], second: Iterable[str], third: Iterable[str]) -> list[tuple[str, str, str]]:
    """Triples with every pair of a second and a third value, and the first values in rotation.

    Every pair of any two values occurs, if there are no more first values than second or third ones.
    """
    thirds = list(third)
    return [(first[(i + j) % len(first)], b, c) for i, b in enumerate(second) for j, c in enumerate(thirds)]


def slow_but(kept: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names; those that are not kept are marked slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
