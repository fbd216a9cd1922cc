"""Selects the cases of a table that run in `make test`; the others run only in `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names; those that are not kept are marked slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
