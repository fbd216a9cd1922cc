"""Fixtures of several files of unit tests."""

import pytest

from titanlite.data.prepare import documents


@pytest.fixture
def small_parts(monkeypatch):
    """Inputs of a few hundred bytes are split as large ones are."""
    monkeypatch.setattr(documents, "_SMALLEST", 1)


@pytest.fixture
def hub_cache(tmp_path_factory, monkeypatch):
    """The package leaves locks in the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
