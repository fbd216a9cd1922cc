"""What a run with stages reports. test_variants.py has its checkpoints."""

from unittest.mock import patch

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU
from tests.distributed.test_resume import ONE, Degrees, reports, run
from titanlite.loop import metrics

HERE = "tests.distributed.test_pipeline_runs"
STAGES: Degrees = {"pp": 2}


def test_reports_are_those_of_one_process(pools, tmp_path):
    """Loss, norm, rate, tokens, validation, the loads of all layers' experts; speed and memory are there too."""
    keys = {"model": {"name": "tests.tiny_moe"}, "flavor": "shared", "moe": {"bias_update_speed": 0.01}}
    more = {"training": {"local_batch_size": 2, "z_loss": 1e-3}, "validation": {"enable": True, "freq": 2, "steps": 2}}
    for degrees in (ONE, STAGES):
        run(pools, degrees, tmp_path / str(len(degrees)), 2, **keys, **more)
    alone, split = (reports(tmp_path / name) for name in "01")
    own = ("tokens_per_second", "tokens_per_second_per_device", "data_wait_fraction", "peak_memory_gib")
    for expected, found in zip(alone, split, strict=True):
        assert found.keys() == expected.keys() and {"expert_load/1", "loss_mean", "grad_norm"} <= found.keys()
        same = [name for name in expected if name not in own and not name.endswith("_seconds")]
        assert {name: found[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-5)
        assert found["tokens_per_second_per_device"] == pytest.approx(found["tokens_per_second"] / 2)
    assert "validation_loss" in split[-1]


def memory_of_ranks() -> float:
    rank = torch.distributed.get_rank()
    with patch.object(metrics, "peak_memory_gib", lambda _: 1.0 + rank):
        return metrics.largest_peak_gib(CPU)


def test_the_memory_that_is_reported_is_that_of_the_rank_with_most(pools: dict[int, Pool]):
    assert pools[2].run(f"{HERE}:memory_of_ranks") == [2.0, 2.0]
