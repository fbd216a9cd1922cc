"""Cleans up after a run of the tests, however it ends: a separate process that outlives pytest for a moment.

    python tests/guard.py PARENT FOLDER MARK

When its parent, a process, is gone, it kills every process with TITANLITE_TESTS=MARK in its
environment, whatever session the process is in, takes down what is mounted under FOLDER, and removes FOLDER, which is where
the tests put all temporary files. Linux only; elsewhere it only removes the folder.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "TITANLITE_TESTS"
_EVERY = 0.25  # seconds between checks of the parent
_PATIENCE = 5.0  # seconds for trackers to end by themselves


def wait_for_the_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_EVERY)


def marked(mark: str, variable: str = VARIABLE) -> list[int]:
    """The processes with this mark in their environment, without this one; zombies have no environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if f"{variable}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def is_tracker(pid: int) -> bool:
    """Whether a process is multiprocessing's resource tracker, which removes semaphores and shared memory after their last
    user.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def clean(folder: Path, mark: str) -> None:
    until = time.monotonic() + _PATIENCE
    while left := marked(mark):  # repeatedly, for processes started meanwhile
        for pid in left:
            if not is_tracker(pid) or time.monotonic() > until:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    with suppress(OSError):
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounts if Path(place).is_relative_to(folder)]):
            subprocess.run(["umount", "-l", place], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals that end the tests must not end this process
    wait_for_the_end_of(int(sys.argv[1]))
    clean(Path(sys.argv[2]), sys.argv[3])
