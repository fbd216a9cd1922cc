"""Ranks agree on stopping at the same step, without waiting for each other in the steps before."""

import datetime
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool
from tests.waiting import until
from titanlite.launch import stop
from titanlite.launch.process import set_timeout

HERE = "tests.distributed.test_stop"


def answers(requests: dict[int, tuple[int, int]], steps: int) -> list[str | None]:
    """The answer after each step, up to the first reason to stop. requests: rank -> (step, signal in that step)."""
    asked = stop.Stop(0.0)
    answers: list[str | None] = []
    try:
        for step in range(steps):
            if requests.get(dist.get_rank(), (-1, 0))[0] == step:
                stop._received = signal.Signals(requests[dist.get_rank()][1])
            answers.append(asked.agreed())
            if answers[-1]:
                break
        asked.close()
    finally:
        stop._received = None
    return answers


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ({2: (3, signal.SIGTERM)}, "rank 2 got SIGTERM"),
        ({0: (3, signal.SIGUSR1)}, "rank 0 got SIGUSR1"),
        (dict.fromkeys(range(4), (3, signal.SIGUSR2)), "the launcher of rank 3 was requested to stop"),
        ({1: (3, signal.SIGTERM), 3: (4, signal.SIGTERM)}, "rank 1 got SIGTERM"),
    ],
)
def test_a_request_to_one_rank_reaches_all_one_step_later(pools: dict[int, Pool], requests, reason):
    assert pools[4].run(f"{HERE}:answers", requests=requests, steps=9) == [[None, None, None, None, reason]] * 4


def test_a_request_in_the_last_step_has_no_effect_and_leaves_no_pending_collective(pools: dict[int, Pool]):
    assert pools[4].run(f"{HERE}:answers", requests={1: (4, signal.SIGTERM)}, steps=5) == [[None] * 5] * 4
    assert pools[4].run(f"{HERE}:answers", requests={}, steps=3) == [[None] * 3] * 4


def one_step_ahead(folder: Path) -> bool:
    """Rank 1 enters the first call after rank 0 has left it; whether it had entered when rank 0 left the second."""
    asked, left, came = stop.Stop(0.0), folder / "left", folder / "came"
    dist.barrier()
    if dist.get_rank() == 1:
        until(left.exists)
        came.touch()
    asked.agreed()
    left.touch()
    asked.agreed()
    asked.close()
    return came.exists()


def test_a_rank_is_one_step_ahead_of_one_that_has_not_come_and_no_more(pools: dict[int, Pool], tmp_path):
    assert pools[2].run(f"{HERE}:one_step_ahead", folder=tmp_path) == [True, True]


def patience() -> list[float]:
    """Timeouts in seconds of the default group, of the stopping one, and of one with its own, after they were set to 7."""
    asked, own = stop.Stop(0.0), dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=11))
    set_timeout(7, but=own)
    groups = dist.group.WORLD, asked.group, own
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    set_timeout(60)
    dist.destroy_process_group(own)
    asked.close()
    return found


def test_every_group_has_the_timeout_of_a_step_but_one_with_its_own(pools: dict[int, Pool]):
    assert pools[2].run(f"{HERE}:patience") == [[7.0, 7.0, 11.0]] * 2
