"""Starts run_train.sh as a user does, and finds every process that it starts."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
MARK = "TITANLITE_TEST_RUN"  # in the environment of all processes of one run, in any session
_OF_THE_LAUNCHER = (
    *("NGPU", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "RDZV_TIMEOUT", "LOG_RANK", "MAX_RESTARTS", "OMP_NUM_THREADS"),
    "PYTHONPATH",
)
# bash's warning if the user's locale is not installed on this machine, as after ssh
_OF_A_LOCALE = re.compile(r"^.*: warning: setlocale: .*\n", re.MULTILINE)


def free_port() -> int:
    """One below those that Linux by default gives to whoever asks for any, such as gloo: it usually stays free until it is
    used.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", random.SystemRandom().randrange(20_000, 29_000)))
            return probe.getsockname()[1]


class Launch(NamedTuple):
    """A started run."""

    process: subprocess.Popen[str]
    mark: str

    def pids(self) -> list[int]:
        """Its living processes, with any parent."""
        return processes(self.mark)

    def ranks(self) -> dict[int, int]:
        """rank -> process, of the ranks that are alive."""
        names = {pid: _name(pid) for pid in self.pids()}
        return {int(name.removeprefix("rank ")): pid for pid, name in names.items() if name.startswith("rank ")}

    def data_workers(self) -> list[int]:
        """The data workers that are alive, of all ranks."""
        return [pid for pid in self.pids() if _name(pid).startswith("data worker ")]

    def catches(self, sign: signal.Signals) -> bool:
        """Whether the started process has a handler for a signal by now, such as a shell's trap."""
        return self._has(sign, "SigCgt")

    def has_taken(self, sign: signal.Signals) -> bool:
        """Whether a signal that was sent to the started process has interrupted it by now."""
        return not self._has(sign, "ShdPnd")

    def _has(self, sign: signal.Signals, mask: str) -> bool:
        (found,) = re.findall(rf"^{mask}:\s*(\w+)", Path(f"/proc/{self.process.pid}/status").read_text(), re.MULTILINE)
        return bool(int(found, 16) >> (sign - 1) & 1)

    def has_loaded(self, library: str) -> bool:
        """Whether the started process has mapped a file of this name by now; a shell has not before it becomes Python."""
        return library in Path(f"/proc/{self.process.pid}/maps").read_text()


class Ended(NamedTuple):
    """The outcome of a run."""

    code: int  # the exit code, as in a shell
    out: str
    err: str
    left: list[int]  # remaining processes


def launch(*words: str, folder: Path, script: Path = ROOT / "run_train.sh", **variables: str) -> Launch:
    """Starts run_train.sh, or a link to it, in `folder` on the CPU, with only `variables` of its variables in the
    environment.
    """
    mark = uuid.uuid4().hex
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_LAUNCHER}
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", MARK: mark}
    process = subprocess.Popen(
        [script, *words],
        cwd=folder,
        env=kept | own | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Launch(process, mark)


def finish(started: Launch, timeout: float = PATIENCE) -> Ended:
    """Waits for the end, up to a timeout, and then kills all remaining processes."""
    try:
        out, err = started.process.communicate(timeout=timeout)
        with suppress(AssertionError):  # processes that are ending may take a while on a busy machine
            until(lambda: not started.pids(), patience=60)
        left = started.pids()
    finally:
        for pid in started.pids():
            os.kill(pid, signal.SIGKILL)
        started.process.wait()
    code = started.process.returncode
    return Ended(128 - code if code < 0 else code, out, _OF_A_LOCALE.sub("", err), left)


def run(*words: str, folder: Path, timeout: float = PATIENCE, **variables: str) -> Ended:
    return finish(launch(*words, folder=folder, **variables), timeout)


def processes(mark: str) -> list[int]:
    """All processes with this mark in their environment; zombies have none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}" in (entry / "environ").read_text(errors="replace").split("\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _name(pid: int) -> str:
    """The name of a process; a rank's is "rank 3"."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
