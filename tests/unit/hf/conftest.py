"""Folders that transformers wrote, and checkpoints that import-hf makes from them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import hf_folders


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Callable[..., Path]:
    """Folders that transformers wrote, each once; must not be changed."""
    written: dict[tuple, Path] = {}

    def source(name: str, flavor: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, flavor, dtype)
        if key not in written:
            written[key] = hf_folders.write(tmp_path_factory.mktemp("source"), *key)
        return written[key]

    return source


@pytest.fixture
def source(sources, tmp_path) -> Path:
    """A test's own folder, with three files."""
    return shutil.copytree(sources("tests.tiny", "plain"), tmp_path / "source")


@pytest.fixture(scope="module")
def imported(sources, pools, tmp_path_factory) -> Callable[..., Path]:
    """Checkpoints that import-hf makes from these folders."""
    made: dict[tuple, Path] = {}

    def checkpoint(name: str, flavor: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, flavor, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("imported") / "weights"
            pools[1].run("tests.hf_folders:import_here", source=sources(*key), output=made[key], model=name)
        return made[key]

    return checkpoint
