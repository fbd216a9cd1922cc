"""Fixtures of several files with tests of own parts."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.conftest import assets, group_of_one

__all__ = ["assets", "group_of_one", "own_module"]


@pytest.fixture
def own_module(tmp_path, monkeypatch) -> Iterator[Callable[[str], Path]]:
    """Writes the user's module `own_code`, to be imported again; -> its file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_code.py"

    def write(text: str) -> Path:
        sys.modules.pop("own_code", None)
        file.write_text(text)
        importlib.invalidate_caches()
        return file

    yield write
    sys.modules.pop("own_code", None)
