"""Which of several failed ranks the launcher names: the one that brought the others down."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titanlite.launch import first_failure

KILL, SEGV, ABORT, TERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGTERM


def failures(noted: list[tuple[int, int, int]]) -> dict[int, ProcessFailure]:
    """From (rank, exit code, second) in the order in which torchrun has noted them."""
    found = {}
    for rank, code, second in noted:
        found[rank] = ProcessFailure(rank, 1000 + rank, code, "no such file")
        found[rank].timestamp = second
    return found


@pytest.mark.parametrize(
    ("noted", "rank"),
    [
        ([(1, 1, 50)], 1),
        ([(0, 1, 50), (1, KILL, 50)], 1),  # found at one look: rank 0 has lost its connection to the killed rank
        ([(0, 1, 50), (1, KILL, 51), (2, 1, 51)], 1),  # the second changed in between
        ([(0, 1, 50), (2, 1, 50), (3, SEGV, 50)], 3),
        ([(1, KILL, 50), (0, TERM, 50)], 1),  # torchrun has ended rank 0
        ([(3, 2, 50), (0, TERM, 50), (1, TERM, 51)], 3),
        ([(2, 2, 50), (0, KILL, 80)], 2),  # torchrun has ended rank 0, which did not heed SIGTERM
        ([(0, 1, 50), (1, 2, 50)], 1),  # rank 1 has said what is wrong
        ([(0, 1, 50), (1, 1, 50)], 0),
        ([(1, 1, 50), (0, ABORT, 60)], 1),  # the watchdog of a survivor
        ([(1, TERM, 50), (0, TERM, 50)], 1),  # somebody has ended rank 1
    ],
)
def test_the_rank_that_failed_first_is_named_and_not_one_that_failed_because_of_it(noted, rank):
    found = first_failure(failures(noted))
    assert (found[0], found[1].pid) == (rank, 1000 + rank)
