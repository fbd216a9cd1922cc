"""The stack dumps of a rank that fails, crashes, or is ended while it hangs."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from titanlite.launch import stacks

# With SIGQUIT blocked, as the launcher does for every rank.
RANK = """
import ctypes, os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT])
from titanlite.ground import errors
from titanlite.launch import stacks

def somewhere_in_the_model():
    print("ready", flush=True)
    {deed}

stacks.open_dump(Path({folder!r}), 3)
errors.at(37, "forward and backward")
somewhere_in_the_model()
stacks.close_dump()
"""


def start(folder: Path, deed: str) -> subprocess.Popen[str]:
    """Rank 3 of a run, with its dump open."""
    script = RANK.format(folder=str(folder), deed=deed)
    environment = os.environ | {"RANK": "3", "WORLD_SIZE": "4"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def dump(folder: Path) -> str:
    return (folder / "stacks/rank-3.txt").read_text()


def test_the_launcher_gets_the_stack_of_a_rank_that_is_stuck_in_a_library(tmp_path):
    process = start(tmp_path, "ctypes.CDLL(None).sleep(600) and ctypes.CDLL(None).sleep(600)")
    stacks.request(tmp_path, {3: process.pid}, "ended because rank 0 has failed")
    process.kill()
    process.wait()
    lines = dump(tmp_path).splitlines()
    assert lines[0].endswith(f"rank 3 (process {process.pid}): ended because rank 0 has failed")
    assert any("in somewhere_in_the_model" in line for line in lines[1:])


def test_a_full_disk_does_not_keep_the_launcher_from_ending_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_LONGEST", 0.0)
    stacks.folder_of(tmp_path).mkdir()
    stacks.file_of(tmp_path, 3).symlink_to("/dev/full")
    signalled = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    stacks.request(tmp_path, {3: 12345}, "ended because rank 0 has failed")
    assert signalled == [(12345, signal.SIGQUIT)]


def test_a_crash_leaves_the_stack_and_a_successful_start_leaves_nothing_more(tmp_path):
    assert start(tmp_path, "os.abort()").wait(PATIENCE) == -signal.SIGABRT
    first = dump(tmp_path)
    assert first.startswith("Fatal Python error: Aborted") and "in somewhere_in_the_model" in first
    assert start(tmp_path, "pass").wait(PATIENCE) == 0
    assert dump(tmp_path) == first


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("[.../unbound_buffer.cc:78] Timed out waiting 100000ms for recv operation", "waited 100 s for the other ranks"),
        ("[.../pair.cc:547] Connection closed by peer [127.0.0.1]:17320", "lost the connection to another rank"),
        ("socket has broken\nand more", "socket has broken"),
    ],
)
def test_an_error_of_a_collective_is_reported_with_its_meaning(text, meaning):
    assert stacks._echo(RuntimeError(text)) == meaning


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[.../pair.cc:547] Connection closed by peer [127.0.0.1]:17320", stacks.ECHO),
        ("[.../gloo/transport/tcp/pair.cc:150] Cannot allocate memory", 2),
        ("ncclSystemError: System call (e.g. socket, malloc) failed. Last error: Cuda failure 2 'out of memory'", 2),
        ("another error", 1),
    ],
)
def test_only_an_error_that_another_rank_may_have_caused_has_the_code_of_an_echo(text, code, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))  # of the traceback
    assert stacks.report(RuntimeError(text)) == code
