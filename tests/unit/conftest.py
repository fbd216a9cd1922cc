"""Fixtures of several unit test files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.token_files import TEXTS
from titanlite.data.prepare import documents
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.launch.addresses import set_up_gloo


@pytest.fixture
def small_parts(monkeypatch):
    """Splits inputs of a few hundred bytes like large ones."""
    monkeypatch.setattr(documents, "_SMALLEST", 1)


@pytest.fixture
def assets(tmp_path) -> Path:
    """A folder with a tokenizer of TEXTS."""
    folder = tmp_path / "assets"
    folder.mkdir()
    train_tokenizer(TEXTS).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Replaces the user's cache by an empty one."""
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub_cache(tmp_path_factory, monkeypatch):
    """The datasets package leaves locks in the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@contextlib.contextmanager
def _group() -> Iterator[None]:
    set_up_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process only, until the test ends: another test of its file may predict, which must not have
    one.
    """
    with _group():
        yield


@pytest.fixture(scope="module")
def group_of_file() -> Iterator[None]:
    """The same for a file whose tests all need it."""
    with _group():
        yield
