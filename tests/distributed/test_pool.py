"""The pool of ranks names the failed rank and the failure, and continues with new ranks."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool, WorkerFailure

HERE = "tests.distributed.test_pool"


def add_up(fail: str = "", failing: int = -1) -> int:
    """All ranks sum their numbers; the failing one does not take part."""
    rank = torch.tensor(dist.get_rank())
    if rank == failing and fail == "raise":
        raise ValueError("no more")
    if rank == failing and fail == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == failing and fail == "hang":
        time.sleep(600)
    dist.all_reduce(rank)
    return rank.item()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ({"fail": "raise", "failing": 1}, r"rank 1 of 2: Traceback[\s\S]*ValueError: no more"),
        ({"fail": "die", "failing": 0}, r"rank 0 of 2: died: SIGKILL"),
        ({"fail": "hang", "failing": 1, "timeout": 2}, r"rank 1 of 2 did not answer; it stands at:[\s\S]*add_up"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_failing_rank_is_named_and_the_pool_works_again(failure: dict[str, Any], message: str, monkeypatch):
    monkeypatch.setattr("tests.distributed.pool._GRACE", 2.0)
    pool = Pool(2)
    try:
        assert pool.run(f"{HERE}:add_up") == [1, 1]
        before = [worker.pid for worker in pool.workers]
        with pytest.raises(WorkerFailure, match=message):
            pool.run(f"{HERE}:add_up", **failure)
        assert pool.run(f"{HERE}:add_up") == [1, 1]
        assert not set(before) & {worker.pid for worker in pool.workers}
    finally:
        pool.stop()
