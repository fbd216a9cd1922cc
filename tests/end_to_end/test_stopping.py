"""Runs that are asked to stop, and runs that torchrun starts again: nothing done is lost, and the exit code says what to do."""

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.launcher import Ended, Launch, finish, launch, run
from tests.end_to_end.test_run_train import SLOWLY, reports, when_training, working_folder
from tests.waiting import PATIENCE, until

ENDLESS = ("--training.steps", "1000000")

# Added to the model: its third forward pass on rank 1, once in all starts of the run.
ONCE = """

class Model(Model):
    calls = 0

    def forward(self, *args):
        import os, pathlib, signal, time
        self.calls += 1
        marker = pathlib.Path("marker")
        if self.calls == 3 and os.environ["RANK"] == "1" and not marker.exists():
            marker.write_text(str(os.getpid()))
            {deed}
        return super().forward(*args)
"""


BREAKING = """

def raise_where_a_pipe_is_broken():
    import os, pathlib

    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        pathlib.Path("broken").touch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return working_folder(tmp_path)


def wait_until(there: Callable[[], object], started: Launch) -> None:
    until(there, lambda: started.process.poll() is None)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "out/checkpoint").glob("step-*"))


def steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in reports(folder / "out")]


def assert_stopped(ended: Ended, folder: Path, reason: str) -> int:
    """That a run has stopped as one that is to be started again; -> the step it has come to."""
    assert (ended.code, ended.left) == (75, []), ended.err
    assert "Traceback" not in ended.err and "the run is over" not in ended.err
    found = re.search(rf"stopping after step (\d+): {reason}", ended.err)
    assert found, ended.err
    assert checkpoints(folder) == [int(found[1])] == steps(folder)[-1:]
    assert not (folder / "out/stacks").exists()
    return int(found[1])


def test_sigterm_to_the_launcher_while_the_ranks_start_stops_them_after_a_step_and_the_run_goes_on_later(folder):
    started = launch("run.toml", *ENDLESS, folder=folder, NGPU="2", **SLOWLY)
    wait_until(lambda: len(started.ranks()) == 2, started)
    started.process.send_signal(signal.SIGTERM)
    ended = finish(started)
    stopped = assert_stopped(ended, folder, "the launcher of rank 1 was asked to stop")
    assert "SIGTERM: the ranks finish their step, save and stop; a second signal ends them at once" in ended.err

    ended = run("run.toml", "--training.steps", str(stopped + 2), folder=folder, NGPU="2")
    assert (ended.code, ended.left) == (0, []), ended.err
    assert steps(folder) == list(range(1, stopped + 3))


STAGES = ("--parallelism.pipeline_parallel_degree", "2", "--training.global_batch_size", "4")


@pytest.mark.slow  # tests/distributed/test_stop.py has it without the launcher
@pytest.mark.parametrize("mesh", [(), STAGES], ids=["shards", "stages"])
def test_sigusr1_to_one_rank_stops_all_at_the_same_step_and_is_no_failure_to_restart_after(folder, mesh):
    started = launch("run.toml", *ENDLESS, *mesh, folder=folder, NGPU="2", MAX_RESTARTS="3", **SLOWLY)
    when_training(started, folder / "out")
    os.kill(started.ranks()[1], signal.SIGUSR1)
    ended = finish(started)
    assert_stopped(ended, folder, "rank 1 got SIGUSR1")
    assert "start 2" not in ended.err


@pytest.mark.slow
def test_a_signal_to_the_launcher_of_one_of_two_nodes_stops_both(folder):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    variables = {"NNODES": "2", "RDZV_ENDPOINT": f"localhost:{port}", "NGPU": "1", **SLOWLY}
    nodes = [launch("run.toml", *ENDLESS, folder=folder, NODE_RANK=str(number), **variables) for number in (0, 1)]
    try:
        when_training(nodes[0], folder / "out")
        nodes[1].process.send_signal(signal.SIGUSR1)
    finally:
        ended = [finish(node) for node in nodes]
    assert [(end.code, end.left) for end in ended] == [(75, [])] * 2, ended
    assert "SIGUSR1: the ranks finish" in ended[1].err and "SIGUSR1" not in ended[0].err
    assert checkpoints(folder) == steps(folder)[-1:]


@pytest.mark.slow  # tests/distributed/test_stop.py has it without the launcher
def test_a_time_limit_stops_a_run_of_one_process(folder):
    ended = run("run.toml", *ENDLESS, "--job.time_limit_minutes", "0.01", folder=folder)
    # The answer to what was asked after the first step comes after the second one; a single process needs no answer.
    assert assert_stopped(ended, folder, re.escape("job.time_limit_minutes = 0.01 are over")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("library", ["", "libtorch"], ids=["the shell", "the launcher"])
def test_a_signal_before_there_are_ranks_ends_a_run_that_is_to_be_started_again(folder, library):
    started = launch("run.toml", folder=folder)
    wait_until(lambda: started.has_loaded(library) and started.catches(signal.SIGTERM), started)
    started.process.send_signal(signal.SIGTERM)
    assert finish(started).code == 75


def test_a_second_signal_ends_a_run_at_once(folder):
    with open(folder / "own/model.py", "a") as file:
        file.write(ONCE.format(deed="time.sleep(600)"))
    started = launch("run.toml", *ENDLESS, folder=folder, NGPU="2", **SLOWLY)
    wait_until((folder / "marker").exists, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.stderr is not None
    assert any("a second signal ends them at once" in line for line in started.process.stderr)
    assert len(started.ranks()) == 2
    started.process.send_signal(signal.SIGUSR1)
    ended = finish(started)
    assert (ended.code, ended.left) == (128 + signal.SIGUSR1, []), ended.err
    assert "stopped by SIGUSR1" in ended.err and "Traceback" not in ended.err
    assert not (folder / "out/stacks").exists()


@pytest.mark.slow
def test_a_connection_that_breaks_is_an_exception_and_not_the_end_of_a_rank(folder):
    """gloo writes to sockets as this does; by SIGPIPE, the death of a rank would be that of its neighbours."""
    with open(folder / "own/model.py", "a") as file:
        file.write(ONCE.format(deed="raise_where_a_pipe_is_broken()"))
        file.write(BREAKING)
    ended = run("run.toml", folder=folder, NGPU="2")
    assert (ended.code, ended.left) == (0, []), ended.err
    assert (folder / "broken").exists() and steps(folder) == [1, 2, 3]


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_goes_on(folder):
    started = launch("run.toml", "--training.steps", "5", folder=folder, NGPU="2")
    started.process.stderr.close()
    assert started.process.wait(PATIENCE) == 0
    assert steps(folder) == [1, 2, 3, 4, 5]


def test_a_run_whose_rank_was_killed_is_started_anew_from_its_last_checkpoint_and_reads_as_one(folder):
    with open(folder / "own/model.py", "a") as file:
        file.write(ONCE.format(deed="os.kill(os.getpid(), signal.SIGKILL)"))
    words = ("--training.steps", "5", "--checkpoint.interval", "1")
    ended = run("run.toml", *words, folder=folder, NGPU="2", MAX_RESTARTS="3")
    assert (ended.code, ended.left) == (0, []), ended.err
    pid = (folder / "marker").read_text()
    assert f"rank 1 (process {pid}) was ended by SIGKILL, as when memory runs out; start 2 of 4" in ended.err
    assert "resumed from out/checkpoint/step-00000002" in ended.err
    assert "the run is over" not in ended.err
    assert steps(folder) == [1, 2, 3, 4, 5]
    stacks = (folder / "out/stacks/rank-0.txt").read_text()
    assert f"ended because rank 1 (process {pid}) was ended by SIGKILL" in stacks and "forward_backward" in stacks
