"""Fixtures that tests of own parts share with the unit tests."""

from tests.unit.conftest import group_of_one

__all__ = ["group_of_one"]
