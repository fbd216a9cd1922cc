"""The reaction of a rank to a request to stop, and to its time limit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.waiting import PATIENCE
from titanlite.config.schema import Config
from titanlite.launch import stop

# Sends itself signals, one after the other, and prints what it has received if it is still running.
LISTENER = """
import os, signal, sys
from titanlite.launch import stop
{before}
stop.listen()
for name in {signals}:
    os.kill(os.getpid(), getattr(signal, name))
{after}
print(stop._received and signal.Signals(stop._received).name, "torch" in sys.modules)
"""


def listen(*signals: str, before: str = "", after: str = "") -> tuple[int, str]:
    """(exit code, what it printed) of a process that gets these signals."""
    script = LISTENER.format(signals=signals, before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("signals", "heard"),
    [
        ([], "None"),
        (["SIGTERM"], "SIGTERM"),
        (["SIGUSR2", "SIGUSR2"], "SIGUSR2"),
        (["SIGUSR2", "SIGTERM", "SIGUSR2"], "SIGTERM"),  # a scheduler has signaled this rank and the launcher
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_request_is_recorded_and_training_continues(signals, heard):
    assert listen(*signals) == (0, f"{heard} False")


@pytest.mark.parametrize("signals", [["SIGTERM", "SIGTERM"], ["SIGTERM", "SIGUSR2", "SIGUSR1"]])
def test_a_second_request_ends_the_rank_by_its_signal(signals):
    assert listen(*signals) == (-getattr(signal, signals[-1]), "")


TORCHRUN = "os.environ['TORCHELASTIC_RUN_ID'] = 'none'"


@pytest.mark.parametrize("first", ["SIGTERM", "SIGUSR1"])
def test_of_a_signal_to_all_processes_torchrun_sends_another_which_is_the_same_request(first):
    assert listen(first, "SIGTERM", before=TORCHRUN) == (0, f"{first} False")
    assert listen(first, "SIGTERM", before=f"{TORCHRUN}; stop._ONE_REQUEST = 0.0") == (-signal.SIGTERM, "")
    ours = f"{TORCHRUN}; os.environ[stop.STORE_OF_START] = '1'"
    assert listen(first, "SIGTERM", before=ours) == (-signal.SIGTERM, "")


@pytest.mark.parametrize(("restarts", "ours", "refused"), [("3", False, True), ("0", False, False), ("3", True, False)])
def test_a_time_limit_that_torchrun_would_take_for_a_failure_is_refused(monkeypatch, restarts, ours, refused):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    if ours:
        monkeypatch.setenv(stop.STORE_OF_START, "1")
    limited = Config.model_validate({"job": {"time_limit_minutes": 30.0}})
    assert [*stop.faults(Config())] == []
    assert any("job.time_limit_minutes = 30: torchrun --max-restarts=3" in fault for fault in stop.faults(limited)) == refused


def test_a_second_request_ends_a_rank_that_is_stuck_in_a_library():
    stuck = "import ctypes, threading; threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    stuck += "; ctypes.CDLL(None).pause()"  # the first signal has already returned from it: only the second one interrupts
    assert listen("SIGTERM", after=stuck) == (-signal.SIGTERM, "")


def test_a_signal_blocked_during_the_start_is_delivered_later():
    early = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); os.kill(os.getpid(), signal.SIGUSR2)"
    assert listen(before=early) == (0, "SIGUSR2 False")


FORK = """
there, ready = os.pipe()
child = os.fork()
if child == 0:
    os.write(ready, b"!")
    signal.pause()
os.read(there, 1)
os.kill(child, signal.SIGTERM)
assert os.wait()[1] == signal.SIGTERM
"""


def test_a_forked_child_of_a_rank_ends_by_sigterm_without_effect_on_the_rank():
    assert listen(after=FORK) == (0, "None False")


@pytest.mark.parametrize(("limit", "over"), [(0.0, False), (59.5, True), (61.0, False)])
def test_a_time_limit_counts_from_the_command_and_ignores_changes_of_the_clock(group_of_one, monkeypatch, limit, over):
    monkeypatch.setattr(stop, "_begun", time.monotonic() - 3600)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    reason = f"job.time_limit_minutes = {limit:g} are over" if over else None
    assert stop.Stop(limit).agreed() == reason


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_the_launcher_leaves_at_once_while_it_has_no_ranks(number):
    script = f"import os, signal; from titanlite.launch import stop; stop.leave_at_once(); os.kill(os.getpid(), {int(number)})"
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE).returncode == stop.EXIT_CODE == os.EX_TEMPFAIL
