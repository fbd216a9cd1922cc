"""Which of several failed ranks the launcher names, the one that brought the others down; and what it does with signals."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titanlite.launch import Launcher, describe, first_failure

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


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_a_failure_is_described_by_the_rank_its_process_and_its_end():
    assert describe(failures([(0, 1, 50), (1, KILL, 50)])) == "rank 1 (process 1001) was ended by SIGKILL"
    assert describe(failures([(3, 2, 50)])) == "rank 3 (process 1003) ended with exit code 2"


def test_the_first_request_is_noted_and_the_second_ends_the_ranks_when_they_are_looked_at_next(launcher, capfd):
    launcher.active = True
    launcher.hear(signal.SIGUSR1, None)
    assert launcher.told and not launcher.at_once
    assert capfd.readouterr().err == "SIGUSR1: the ranks finish their step, save and stop; once more ends them at once\n"
    launcher.hear(signal.SIGTERM, None)
    assert launcher.at_once == signal.SIGTERM


def test_a_request_while_no_rank_runs_but_some_would_be_started_leaves_at_once(launcher):
    with pytest.raises(SystemExit) as left:
        launcher.hear(signal.SIGTERM, None)
    assert left.value.code == 75


def test_a_request_after_the_ranks_have_ended_waits_for_the_other_machines_and_a_second_one_does_not(launcher):
    launcher.over = True
    launcher.hear(signal.SIGTERM, None)
    with pytest.raises(SignalException):
        launcher.hear(signal.SIGTERM, None)


def test_the_last_line_names_the_folder_of_stacks_where_there_is_one(launcher, tmp_path):
    assert launcher.stacks() == ""
    (tmp_path / "stacks").mkdir()
    assert launcher.stacks() == f"; stacks of all ranks: {tmp_path}/stacks"
