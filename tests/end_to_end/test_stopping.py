"""Runs that are stopped and restarted, and whose ranks fail or hang within a step.

No work is lost, the exit code says what to do, reports name the culprit, and no process is left.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.forked import train
from tests.end_to_end.launcher import ROOT, Ended, Launch, finish, free_port, launch, run
from tests.end_to_end.test_run_train import SLOWLY, reports, when_training, working_folder
from tests.waiting import PATIENCE, until

ENDLESS = ("--training.steps", "1000000")
STAGES = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=1", "--training.global_batch_size=3")

# Added to the model: what its third forward pass does on each rank, in the first start of a run, by WAY_<rank> in the
# environment. It is in the third step of shards, or the third microbatch of stages.
FAILING = """

def wait_for_the_end_of(pid):
    import pathlib, time
    process = pathlib.Path(f"/proc/{pid}")
    try:  # its parent can see the end of a zombie when that has no other threads
        while (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z" or len([*(process / "task").iterdir()]) > 1:
            time.sleep(0.001)
    except OSError:  # its parent has seen it
        pass


class Model(Model):
    calls = 0

    def forward(self, *args):
        import os, pathlib, signal, time
        self.calls += 1
        marker = pathlib.Path("marker")
        way = os.environ.get("WAY_" + os.environ.get("RANK", "")) if self.calls == 3 else None  # without a rank it is traced
        if way == "fails right after":  # as one that has lost its connection, but faster
            while not marker.exists():
                time.sleep(0.001)
            wait_for_the_end_of(marker.read_text())
            os._exit(1)
        if way and not marker.exists():
            pathlib.Path("marker.tmp").write_text(str(os.getpid()))
            os.rename("marker.tmp", "marker")
            if way == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "hangs":
                time.sleep(600)  # the culprit
            if way == "raises":
                raise RuntimeError("the culprit")
        return super().forward(*args)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return working_folder(tmp_path)


@pytest.fixture
def failing(folder) -> Path:
    """The working folder with that added to its model; the file "marker" has the pid of the first rank that does it."""
    with open(folder / "own/model.py", "a") as file:
        file.write(FAILING)
    return folder


def wait_until(there: Callable[[], object], started: Launch) -> None:
    until(there, lambda: started.process.poll() is None)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "out/checkpoint").glob("step-*"))


def steps(folder: Path) -> list[int]:
    return [int(line["step"]) for line in reports(folder / "out")]


def test_sigterm_to_the_launcher_during_the_start_stops_ranks_without_a_restart_and_the_run_can_resume(folder):
    started = launch("run.toml", *ENDLESS, folder=folder, NGPU="2", MAX_RESTARTS="3", **SLOWLY)
    wait_until(lambda: len(started.ranks()) == 2, started)
    started.process.send_signal(signal.SIGTERM)
    ended = finish(started)
    assert (ended.code, ended.left) == (75, []), ended.err
    assert "SIGTERM: the ranks finish their step, save and stop; a second signal ends them at once" in ended.err
    assert [text for text in ("Traceback", "the run is over", "start 2") if text in ended.err] == []
    (stopped,) = checkpoints(folder)
    assert f"stopping after step {stopped}: the launcher of rank 1 was requested to stop" in ended.err
    assert steps(folder)[-1] == stopped and not (folder / "out/stacks").exists()

    resumed = train("run.toml", "--training.steps", str(stopped + 2), folder=folder, ranks=2)
    assert resumed.code == 0, resumed.err
    assert steps(folder) == list(range(1, stopped + 3))


@pytest.mark.slow
def test_a_signal_to_the_launcher_of_one_of_two_nodes_stops_both(folder):
    variables = {"NNODES": "2", "RDZV_ENDPOINT": f"localhost:{free_port()}", "NGPU": "1", **SLOWLY}
    nodes = [launch("run.toml", *ENDLESS, folder=folder, NODE_RANK=str(number), **variables) for number in (0, 1)]
    try:
        when_training(nodes[0], folder / "out")
        nodes[1].process.send_signal(signal.SIGUSR1)
    finally:
        ended = [finish(node) for node in nodes]
    assert [(end.code, end.left) for end in ended] == [(75, [])] * 2, ended
    assert "SIGUSR1: the ranks finish" in ended[1].err and "SIGUSR1" not in ended[0].err
    assert checkpoints(folder) == steps(folder)[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["", "libtorch"], ids=["the shell", "the launcher"])
def test_a_signal_before_ranks_start_ends_the_run_with_the_code_for_a_restart(folder, library):
    started = launch("run.toml", folder=folder)
    wait_until(lambda: started.has_loaded(library) and started.catches(signal.SIGTERM), started)
    started.process.send_signal(signal.SIGTERM)
    assert finish(started).code == 75


def test_a_checkpoint_that_is_being_written_when_a_rank_fails_is_committed(failing):
    slowly = "\n\nimport time\nfrom titanlite.checkpoint import storage\n_write = storage.Writer.write_data\n"
    slowly += "storage.Writer.write_data = lambda *given: time.sleep(2) or _write(*given)\n"
    with open(failing / "own/model.py", "a") as file:
        file.write(slowly)
    keys = "--checkpoint.interval=2", "--checkpoint.async_mode=async"
    ended = train("run.toml", *keys, folder=failing, ranks=2, WAY_1="raises")
    assert "the culprit" in ended.err and checkpoints(failing) == [2], ended.err


def test_a_second_signal_ends_a_run_at_once(failing):
    started = launch("run.toml", *ENDLESS, folder=failing, NGPU="2", WAY_1="hangs", **SLOWLY)
    wait_until((failing / "marker").exists, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.stderr is not None
    assert any("a second signal ends them at once" in line for line in started.process.stderr)
    assert len(started.ranks()) == 2
    started.process.send_signal(signal.SIGUSR1)
    ended = finish(started)
    assert (ended.code, ended.left) == (128 + signal.SIGUSR1, []), ended.err
    assert "stopped by SIGUSR1" in ended.err and "Traceback" not in ended.err
    assert not (failing / "out/stacks").exists()


@pytest.mark.slow
def test_a_run_continues_when_its_output_is_no_longer_read(folder):
    """gloo writes to sockets like this: with SIGPIPE, the death of a rank would kill its neighbors."""
    started = launch("run.toml", "--training.steps", "5", folder=folder, NGPU="2")
    started.process.stderr.close()
    assert started.process.wait(PATIENCE) == 0
    assert steps(folder) == [1, 2, 3, 4, 5]


def test_a_run_with_a_killed_rank_restarts_from_its_last_checkpoint_and_reports_one_trajectory(failing):
    words = ("--training.steps", "5", "--checkpoint.interval", "1")
    ended = run("run.toml", *words, folder=failing, NGPU="2", MAX_RESTARTS="3", WAY_1="is killed")
    assert (ended.code, ended.left) == (0, []), ended.err
    pid = (failing / "marker").read_text()
    assert f"rank 1 (process {pid}) was ended by SIGKILL, as when memory runs out; start 2 of 4" in ended.err
    assert "resumed from out/checkpoint/step-00000002" in ended.err
    assert "the run is over" not in ended.err
    assert steps(failing) == [1, 2, 3, 4, 5]
    stacks = (failing / "out/stacks/rank-0.txt").read_text()
    assert f"ended because rank 1 (process {pid}) was ended by SIGKILL" in stacks and "forward_backward" in stacks


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_continue_from_the_last_checkpoint(failing):
    """torchrun's store still had the addresses of the dead ranks."""
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "-m", "titanlite", "train", "run.toml")
    words += ("--training.steps", "5", "--checkpoint.interval", "1", "--comm.init_timeout_seconds", "60")
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WAY_1": "is killed"}
    ended = finish(launch(*words, folder=failing, script=Path(sys.executable), **own))
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "resumed from out/checkpoint/step-00000002" in ended.err
    assert steps(failing) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True])
def test_a_stop_signal_to_torchrun_and_to_its_ranks_saves(folder, to_all):
    """torchrun sends its ranks SIGTERM for its own, which a scheduler may have sent them too."""
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "titanlite", "train")
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEP_SECONDS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
    started = launch(*words, "run.toml", *ENDLESS, folder=folder, script=Path(sys.executable), **own)
    try:
        when_training(started, folder / "out")
        for pid in started.pids() if to_all else [started.process.pid]:
            os.kill(pid, signal.SIGTERM)
    finally:
        ended = finish(started)
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "got SIGTERM" in ended.err and checkpoints(folder) == steps(folder)[-1:] != []


@pytest.mark.slow
def test_a_rank_that_a_shell_has_started_outlives_it(folder):
    """As with nohup: only an agent, such as torchrun's, waits for its ranks."""
    waiting = "while [ ! -e out/metrics.jsonl ]; do sleep 0.1; done"
    shell = ("-c", f"{sys.executable} -m titanlite train run.toml {' '.join(ENDLESS)} & {waiting}")
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    started = launch(*shell, folder=folder, script=Path("/bin/sh"), **own, **SLOWLY)
    try:
        started.process.wait(PATIENCE)
        before = len(steps(folder))
        until(lambda: len(steps(folder)) > before + 5, started.pids)
    finally:
        for pid in started.pids():
            os.kill(pid, signal.SIGKILL)
        finish(started)


# ------------------------------------------------------------------------------------------------------------ ranks that fail


def run_failing(folder: Path, *words: str, **ways: str) -> Ended:
    return run("run.toml", *ENDLESS, *words, folder=folder, NGPU="2", **ways)


def line_of(folder: Path, text: str) -> int:
    """The number of the line of the model's file that ends with a text."""
    lines = (folder / "own/model.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


@pytest.mark.slow  # tests/unit/test_launch.py has it without runs
@pytest.mark.parametrize(
    ("killed", "words", "ways"),
    [
        (1, (), {"WAY_0": "fails right after", "WAY_1": "is killed"}),
        (0, STAGES, {"WAY_0": "is killed"}),  # rank 1 waits for rank 0's hidden states
    ],
)
def test_a_rank_killed_within_a_step_is_the_one_that_is_named(failing, killed, words, ways):
    ended = run_failing(failing, *words, **ways)
    pid = (failing / "marker").read_text()
    assert (ended.code, ended.left) == (137, []), ended.err
    assert f"rank {killed} (process {pid}) was ended by SIGKILL, as when memory runs out; the run is over" in ended.err
    assert ended.err.count("the run is over") == 1
    assert not (failing / f"out/stacks/rank-{killed}.txt").exists()  # it could write nothing


@pytest.mark.slow
def test_a_hung_rank_ends_the_run_after_the_timeout_and_leaves_its_stack(failing):
    ended = run_failing(failing, "--comm.train_timeout_seconds", "6", WAY_1="hangs")
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "rank 0, step 3, forward and backward: waited 6 s for the other ranks" in ended.err
    assert "the run is over; stacks of all ranks: out/stacks" in ended.err
    assert "Traceback" not in ended.err
    stuck, hung = [(failing / f"out/stacks/rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert "rank 0, step 3, forward and backward" in stuck and "Timed out waiting 6000ms" in stuck
    assert "in all_gather_" in stuck  # the name differs between PyTorch 2.11 and 2.13
    assert "rank 1 (process " in hung and "ended because rank 0 (process " in hung
    assert f'own/model.py", line {line_of(failing, "# the culprit")} in forward' in hung


def test_an_exception_on_one_rank_leaves_its_traceback_and_the_stack_of_the_other(failing):
    ended = run_failing(failing, WAY_1="raises")
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "rank 1, step 3, forward and backward: RuntimeError: the culprit (" in ended.err
    assert "traceback: out/stacks/rank-1.txt" in ended.err and "Traceback" not in ended.err
    assert f'own/model.py", line {line_of(failing, "the culprit" + chr(34) + ")")}, in forward' in ended.err
    assert "rank 1 (process " in ended.err.splitlines()[-1]
    assert "ended with exit code 1; the run is over; stacks of all ranks: out/stacks" in ended.err.splitlines()[-1]
    other, failed = [(failing / f"out/stacks/rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert "rank 1, step 3, forward and backward (process " in failed and "RuntimeError: the culprit" in failed
    assert "ended because rank 1 (process " in other and "forward_backward" in other


@pytest.mark.slow
def test_a_hung_stage_ends_the_run_after_the_timeout_of_the_next_stage(failing):
    """gloo waits for a message for the timeout at the creation of the group."""
    words = ("--training.global_batch_size", "2", "--comm.init_timeout_seconds", "45")
    ended = run_failing(failing, *STAGES[:2], *words, WAY_0="hangs")
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "rank 1, step 2, forward and backward: waited 45 s for the other ranks" in ended.err
    assert "the run is over; stacks of all ranks: out/stacks" in ended.err
    assert "Traceback" not in ended.err
    stacks = (failing / "out/stacks/rank-0.txt").read_text()
    assert f'own/model.py", line {line_of(failing, "# the culprit")} in forward' in stacks
