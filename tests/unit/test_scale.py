"""A trillion tokens: opened, and any step found, in negligible time and memory."""

import multiprocessing

import pytest
import torch

from tests import sparse_set


@pytest.mark.parametrize("mask", [pytest.param(False, marks=pytest.mark.slow), True], ids=["pack", "document mask"])
def test_a_trillion_tokens_open_and_a_far_step_is_found_in_bounded_memory(tmp_path, assets, mask):
    """The limits are 2 s, 1 s and 500 MB; benchmarks/data.py measures the times."""
    (tmp_path / "set").mkdir()
    sparse_set.write(tmp_path / "set")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # the memory of a rank, not of pytest
        found = pool.apply(sparse_set.measure, (tmp_path / "set", str(assets), mask))
    assert (found["tokens"], found["documents"]) == (10**12, 10**9)
    assert found["added_mb"] < 150
    assert found["resident_mb"] < 500 or torch.version.cuda, "of which a build for GPUs takes more by itself"
