"""Runs that several test files use; each works on a copy."""

from pathlib import Path

import pytest

from tests.distributed.checkpoint_runs import FILES, SHARD, names, saved, train


@pytest.fixture(scope="session")
def whole(pools, tmp_path_factory) -> Path:
    """An undisturbed run of six steps on two ranks, with all losses."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(pools, SHARD, folder, 6)[0].error == ""
    return folder


@pytest.fixture(scope="session")
def half(pools, tmp_path_factory) -> Path:
    """The same run, stopped after step 4, with checkpoints of the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("half")
    assert train(pools, SHARD, folder, 4)[0].error == ""
    assert saved(folder) == names(2, 4)
    assert sorted(path.name for path in (folder / "checkpoint/step-00000004").iterdir()) == FILES
    return folder
