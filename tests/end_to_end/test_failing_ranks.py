"""Ranks that fail or hang in the middle of a step: what is reported, which files remain, and that no process is left."""

from pathlib import Path

import pytest

from tests.end_to_end.launcher import Ended, run
from tests.end_to_end.test_run_train import reports, working_folder
from titanlite.ground.run_files import read_reports

STAGES = (
    "--parallelism.pipeline_parallel_degree",
    "2",
    "--training.local_batch_size",
    "1",
    "--training.global_batch_size",
    "3",
)

# Added to the model: what its third forward pass does on each rank, by WAY_<rank> in the environment. That is the third step of
# shards, and the third microbatch of stages.
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
        way = os.environ.get("WAY_" + os.environ.get("RANK", ""))  # without a rank it is traced
        if self.calls == 3 and way == "is killed":
            pathlib.Path("killed.tmp").write_text(str(os.getpid()))
            os.rename("killed.tmp", "killed")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and way == "fails right after":  # as one that has lost its connection, but faster
            while not pathlib.Path("killed").exists():
                time.sleep(0.001)
            wait_for_the_end_of(pathlib.Path("killed").read_text())
            os._exit(1)
        if self.calls == 3 and way == "hangs":
            pathlib.Path("hangs").touch()
            time.sleep(600)  # the culprit
        if self.calls == 3 and way == "raises":
            raise RuntimeError("the culprit")
        if self.calls == 3 and way == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return super().forward(*args)
"""


def run_failing(folder: Path, ranks: int, *words: str, **ways: str) -> Ended:
    """A run that fails in the third forward pass; the pid of a killed rank is in the file "killed"."""
    working_folder(folder)
    with open(folder / "own/model.py", "a") as file:
        file.write(FAILING)
    return run("run.toml", "--training.steps", "1000000", *words, folder=folder, NGPU=str(ranks), **ways)


def line_of(folder: Path, text: str) -> int:
    """The number of the line of the model's file that ends with a text."""
    lines = (folder / "own/model.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


@pytest.mark.parametrize(
    ("killed", "words", "ways"),
    [
        (0, (), {"WAY_0": "is killed"}),  # rank 1 is in the forward pass, waiting for rank 0's parameters
        pytest.param(1, (), {"WAY_0": "fails right after", "WAY_1": "is killed"}, marks=pytest.mark.slow),
        pytest.param(0, STAGES, {"WAY_0": "is killed"}, marks=pytest.mark.slow),  # rank 1 waits for rank 0's hidden states
    ],
)
def test_a_rank_killed_in_the_middle_of_a_step_is_the_one_that_is_named(tmp_path, killed, words, ways):
    ended = run_failing(tmp_path, 2, *words, **ways)
    pid = (tmp_path / "killed").read_text()
    assert (ended.code, ended.left) == (137, []), ended.err
    assert f"rank {killed} (process {pid}) was ended by SIGKILL, as when memory runs out; the run is over" in ended.err
    assert ended.err.count("the run is over") == 1
    reported = [line["step"] for line in read_reports(tmp_path / "out/metrics.jsonl")]  # the first report makes the file
    assert reported == ([] if words else [1, 2])
    assert not (tmp_path / f"out/stacks/rank-{killed}.txt").exists()  # it could write nothing


@pytest.mark.slow
def test_a_hung_rank_ends_the_run_when_the_others_have_lost_their_patience_and_its_stack_is_left(tmp_path):
    ended = run_failing(tmp_path, 2, "--comm.train_timeout_seconds", "6", WAY_1="hangs")
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "rank 0, step 3, forward and backward: waited 6 s for the other ranks" in ended.err
    assert "the run is over; stacks of all ranks: out/stacks" in ended.err
    assert "Traceback" not in ended.err
    stuck, hung = [(tmp_path / f"out/stacks/rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert "rank 0, step 3, forward and backward" in stuck and "Timed out waiting 6000ms" in stuck
    assert "in all_gather_" in stuck  # one name in PyTorch 2.11, another in 2.13
    assert "rank 1 (process " in hung and "ended because rank 0 (process " in hung
    assert f'own/model.py", line {line_of(tmp_path, "# the culprit")} in forward' in hung


@pytest.mark.slow
@pytest.mark.parametrize("hung", [0, 1])
def test_a_hung_stage_ends_the_run_when_the_next_or_the_previous_one_has_lost_its_patience(tmp_path, hung):
    """In the second step, whose timeout is not the one that the process groups were made with."""
    words = ("--training.global_batch_size", "2", "--comm.train_timeout_seconds", "6")
    ended = run_failing(tmp_path, 2, *STAGES[:4], *words, **{f"WAY_{hung}": "hangs"})
    assert (ended.code, ended.left) == (1, []), ended.err
    assert f"rank {1 - hung}, step 2, forward and backward: waited 6 s for the other ranks" in ended.err
    assert "the run is over; stacks of all ranks: out/stacks" in ended.err
    assert "Traceback" not in ended.err
    stacks = (tmp_path / f"out/stacks/rank-{hung}.txt").read_text()
    assert f'own/model.py", line {line_of(tmp_path, "# the culprit")} in forward' in stacks


@pytest.mark.slow
def test_an_exception_of_one_stage_is_the_one_that_is_reported(tmp_path):
    ended = run_failing(tmp_path, 2, *STAGES, WAY_1="raises")
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "rank 1, step 1, forward and backward: RuntimeError: the culprit (" in ended.err
    assert "rank 1 (process " in ended.err.splitlines()[-1] and "Traceback" not in ended.err


def test_an_exception_on_one_rank_leaves_its_traceback_and_the_stack_of_the_other(tmp_path):
    ended = run_failing(tmp_path, 2, WAY_1="raises")
    assert (ended.code, ended.left) == (1, []), ended.err
    assert "rank 1, step 3, forward and backward: RuntimeError: the culprit (" in ended.err
    assert "traceback: out/stacks/rank-1.txt" in ended.err and "Traceback" not in ended.err
    assert f'own/model.py", line {line_of(tmp_path, "the culprit" + chr(34) + ")")}, in forward' in ended.err
    assert "rank 1 (process " in ended.err.splitlines()[-1]
    assert "ended with exit code 1; the run is over; stacks of all ranks: out/stacks" in ended.err.splitlines()[-1]
    other, failed = [(tmp_path / f"out/stacks/rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert "rank 1, step 3, forward and backward (process " in failed and "RuntimeError: the culprit" in failed
    assert "ended because rank 1 (process " in other and "forward_backward" in other


@pytest.mark.slow  # tests/distributed/test_profiling.py has it without the launcher
def test_out_of_memory_ends_a_run_with_what_helps_and_without_a_traceback(tmp_path):
    ended = run_failing(tmp_path, 1, WAY_0="out of memory")
    assert (ended.code, ended.left) == (2, []), ended.err
    assert "rank 0, step 3, forward and backward: out of memory, 2.00 GiB more were requested" in ended.err
    assert "held by this rank: parameters 0.00 GiB" in ended.err
    assert '1. activation_checkpoint.mode = "selective"' in ended.err
    assert "2. training.local_batch_size = 1 with training.global_batch_size = 2" in ended.err
    assert "Traceback" not in ended.err
    assert [line["step"] for line in reports(tmp_path / "out")] == [1, 2]
