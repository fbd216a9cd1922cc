"""Selects which cases of a table `make test` runs, which only `make test-all`, and which only `make campaign PART=tests`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

IN_MAKE_TEST = "not slow and not campaign"  # as in the Makefile, for `pytest -m`


def slow_but(kept: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names; those that are not kept are marked slow."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


def campaign_but(kept: Collection[str], slow: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names. Those of `slow` are marked so, and those of neither only run in a campaign."""
    marks = {name: () if name in kept else pytest.mark.slow if name in slow else pytest.mark.campaign for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]
