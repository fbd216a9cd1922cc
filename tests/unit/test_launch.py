"""Which of several failed ranks the launcher names, its reaction to signals, and the process that forks the ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.waiting import PATIENCE
from titanlite.launch import launcher as launch
from titanlite.launch import layout, stop
from titanlite.launch.launcher import Launcher, Ranks, first_failure

KILL, SEGV, ABORT, TERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGTERM


def failures(noted: list[tuple[int, int, int]]) -> dict[int, ProcessFailure]:
    """Failures from (rank, exit code, second), in the order in which the agent recorded them."""
    found = {}
    for rank, code, second in noted:
        found[rank] = ProcessFailure(rank, 1000 + rank, code, "no such file")
        found[rank].timestamp = second
    return found


@pytest.mark.parametrize(
    ("noted", "rank"),
    [
        ([(0, 1, 50), (1, KILL, 50)], 1),  # found in one poll: rank 0 has lost its connection to the killed rank
        ([(0, 1, 50), (1, KILL, 51), (2, 1, 51)], 1),  # the second changed in between
        ([(0, 1, 50), (2, 1, 50), (3, SEGV, 50)], 3),
        ([(1, KILL, 50), (0, TERM, 50)], 1),  # somebody has ended rank 0
        ([(2, 2, 50), (0, KILL, 80)], 2),  # much later
        ([(0, 1, 50), (1, 2, 50)], 1),  # rank 1 has reported the fault
        ([(0, 3, 50), (1, 1, 50)], 1),  # seen at once, by a launcher that stood still: rank 0 has lost its connection
        ([(0, 1, 50), (1, 1, 50)], 0),
        ([(1, 1, 50), (0, ABORT, 60)], 1),  # the watchdog of a survivor
        ([(0, ABORT, 50), (1, KILL, 50)], 1),  # gloo has aborted rank 0, whose connection was lost
        ([(0, 1, 50), (1, ABORT, 50)], 1),
        ([(1, TERM, 50), (0, TERM, 50)], 1),  # somebody has ended rank 1
    ],
)
def test_the_rank_that_failed_first_is_named_and_not_a_consequent_failure(noted, rank):
    found = first_failure(failures(noted))
    assert (found[0], found[1].pid) == (rank, 1000 + rank)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path, start_script)


def start_script(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A rank that runs $SCRIPT, with all signals blocked, as the fork server starts one."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (*stop.SIGNALS, signal.SIGQUIT))
    try:
        script = [sys.executable, "-c", environment["SCRIPT"]]
        return subprocess.Popen(script, env=os.environ | environment, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def test_a_request_after_the_ranks_have_ended_waits_for_the_other_nodes_and_a_second_one_does_not(launcher):
    launcher.over = True
    launcher.on_request(signal.SIGTERM, None)
    with pytest.raises(SignalException):
        launcher.on_request(signal.SIGTERM, None)


def test_a_signal_while_the_run_is_ending_does_not_interrupt_that(launcher):
    with pytest.raises(SignalException):
        launcher.on_ending(signal.SIGINT, None)
    launcher.on_ending(signal.SIGINT, None)
    launcher.on_request(signal.SIGTERM, None)
    assert launcher.end_now == signal.SIGINT


def test_the_cores_of_a_container_are_its_quota_of_cpu_time(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "_CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert layout.cores() == 64
    for text, count in (
        ("max 100000", 64),
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("9000000 90000", 64),
    ):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert layout.cores() == count
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for quota, count in ((-1, 64), (150000, 2)):
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert layout.cores() == count


HANGUP = """
import signal
from pathlib import Path
from unittest import mock
from titanlite.launch import launcher
from titanlite.launch.layout import Layout

launcher.rendezvous_handler_registry = mock.Mock()  # PyTorch's takes a name only once
launcher.launch_agent = lambda *_: signal.raise_signal(number)
for number, action in ((signal.SIGHUP, signal.SIG_IGN), (signal.SIGHUP, signal.SIG_DFL), (signal.SIGUSR2, signal.SIG_DFL)):
    signal.signal(signal.SIGHUP, action)
    print(launcher.launch(Layout(1, 1, 0, "localhost", 0, "", 0, 600), launcher.Launcher(Path("out"), None), 60.0))
"""


def test_a_run_outlives_its_terminal_under_nohup_only_and_stops_at_the_signal_that_its_ranks_get():
    """SIGUSR2 is that of Grid Engine's -notify, too. No rank is running here."""
    done = subprocess.run([sys.executable, "-c", HANGUP], capture_output=True, timeout=PATIENCE)
    assert [int(code) for code in done.stdout.split()] == [0, 128 + signal.SIGHUP]
    assert done.returncode == stop.EXIT_CODE


# --------------------------------------------------------------------------------------------------- ranks of two lines


def start_ranks(launcher: Launcher, *scripts: str) -> Ranks:
    """Ranks 4, 5, ... of a run that may be restarted twice."""
    environments = {
        local: {"RANK": str(local + 4), "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "SCRIPT": script}
        for local, script in enumerate(scripts)
    }
    ranks = Ranks(
        launcher,
        name="default",
        entrypoint="titanlite",
        args=dict.fromkeys(environments, ()),
        envs=environments,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    ranks.start()
    return ranks


def test_a_rank_ended_by_a_signal_is_named_and_not_its_neighbor_that_ended_before(launcher, tmp_path, monkeypatch):
    """The kernel takes time to remove a killed process; here a fifth of a second, or more on a busy machine."""
    monkeypatch.setattr(launch, "_CLEARED", PATIENCE)
    dying = tmp_path / "dying"
    neighbor = f"import os, sys, time\nwhile not os.path.exists({str(dying)!r}): time.sleep(0.01)\nsys.exit(1)"
    killed = f"import os, time; open({str(dying)!r}, 'w').close(); time.sleep(0.2); os.kill(os.getpid(), 9)"
    rank, failure = first_failure(end_of(start_ranks(launcher, neighbor, killed)).failures)
    assert (rank, failure.exitcode) == (1, KILL)


def end_of(ranks: Ranks) -> RunProcsResult:
    """How the ranks end, as reported by torch's agent."""
    try:
        result = ranks.wait(timeout=PATIENCE, period=0.05)
        assert result is not None
        return result
    finally:
        ranks.close()
        assert not ranks.running()


def test_a_rank_that_keeps_running_after_another_has_stopped_is_ended_without_a_failure(launcher, monkeypatch):
    monkeypatch.setattr(launch, "_LEAVING", 0.5)
    assert not end_of(start_ranks(launcher, "exit(75)", "import time; time.sleep(60)")).is_failed()
    assert launcher.stopped


@pytest.mark.parametrize(
    ("scripts", "rank"),
    [
        (["exit(75)", "import time; time.sleep(0.5); exit(2)"], 5),  # fails while the others stop
        (["exit(2)", "import time; time.sleep(60)"], 4),  # a fault of the user
    ],
)
def test_ranks_that_would_end_the_same_way_are_not_started_again(launcher, scripts, rank):
    with pytest.raises(ChildFailedError) as raised:
        end_of(start_ranks(launcher, *scripts))
    assert {number: failure.exitcode for number, failure in raised.value.failures.items()} == {rank: 2}


def test_ranks_whose_starter_is_gone_save_and_stop(tmp_path, capfd):
    """A script that had called titanlite.run and was killed left its run behind."""
    launcher = Launcher(tmp_path, start_script, starter=os.getpid())  # this process cannot be its own parent
    saved = f"import signal; signal.sigwait([{int(stop.FROM_LAUNCHER)}]); exit(75)"
    assert not end_of(start_ranks(launcher, saved, saved)).is_failed()
    assert launcher.stopped and f"process {os.getpid()}, which started the run, is gone" in capfd.readouterr().err
    launcher.on_request(signal.SIGTERM, None)  # as of a scheduler, to all that is left
    assert launcher.end_now is None


# ------------------------------------------------------------------------------------------------------ the fork server


# A launcher, its fork server, and a function for new processes.
SCRIPT = """
import contextlib, os, signal, time
from titanlite.launch.fork_server import ForkServer

def sleep():
    print("sleeping", os.getpid(), flush=True)
    os.write(says[1], b"!")
    time.sleep(600)

says = os.pipe()

server = ForkServer("json")
{then}
"""


def run(then: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(then=then)], capture_output=True, text=True, timeout=PATIENCE)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_machine_without_room_for_processes_is_one_message():
    then = """
from titanlite.ground.errors import UserError

server.close()
fork, calls = os.fork, []

def first_only():
    calls.append(1)
    if len(calls) > 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = first_only
server = ForkServer("json")
try:
    server.start(sleep)
except UserError as error:
    print(error)
server.close()
"""
    code, text = run(then)
    assert code == 0 and "Resource temporarily unavailable; lower NGPU" in text


def test_closing_the_server_leaves_no_process():
    then = """
child = server.start(sleep)
server.close()
path = f"/proc/{child.pid}/cmdline"  # empty for a zombie that nobody has waited for
with contextlib.suppress(OSError):  # it has gone
    while open(path).read():
        time.sleep(0.01)
"""
    assert run(then)[0] == 0


def test_signals_are_blocked_until_a_process_has_its_handlers():
    then = """
child = server.start(sleep)
os.read(says[0], 1)
os.kill(child.pid, signal.SIGTERM)
(pending,) = (line for line in open(f"/proc/{child.pid}/status") if line.startswith("ShdPnd"))
assert int(pending.split()[1], 16) >> signal.SIGTERM - 1 & 1
assert child.poll() is None
os.kill(child.pid, signal.SIGKILL)
"""
    assert run(then)[0] == 0


def test_a_process_that_has_ended_keeps_its_pid_until_its_own_exit_code_is_read():
    """The launcher signals ranks that it has found running; the kernel may have given their pids to others."""
    then = """
first, second = server.start(os.getpid), server.start(sleep)
while open(f"/proc/{first.pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
assert second.poll() is None
os.kill(first.pid, signal.SIGQUIT)
assert first.poll() == first.pid % 256 == first.poll()
server.close()
"""
    assert run(then)[0] == 0


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_the_launcher(end):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=f"server.start(sleep)\nos.read(says[0], 1)\n{end}")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output, _ = process.communicate(timeout=PATIENCE)  # returns when the last process that holds the pipe has ended
    assert output.startswith("sleeping ")
