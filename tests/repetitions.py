"""Selects the cases of a table that run in `make test`; the others run only in `make test-all`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def in_turn(first: Sequence[str], second: Iterable[str], third: Iterable[str]) -> list[tuple[str, str, str]]:
    """Triples with every pair of a second and a third value, and the first values in rotation.

    Every pair of any two values occurs, if there are no more first values than second or third ones.
    """
    thirds = list(third)
    return [(first[(i + j) % len(first)], b, c) for i, b in enumerate(second) for j, c in enumerate(thirds)]


def slow_but(kept: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names; those that are not kept are marked slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
