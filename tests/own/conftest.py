"""Fixtures that tests of own parts share with the unit tests."""

from tests.unit.conftest import assets, group_of_one

__all__ = ["assets", "group_of_one"]
