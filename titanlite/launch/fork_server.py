"""Starts the ranks as forks of one process that has imported their modules: imports take the most time of a start.

The fork server is itself a fork of the launcher, made before the launcher has threads or calls CUDA: torch's agent runs a store
and timers in threads, and counts the GPUs. Neither threads nor CUDA survive a fork.
"""

import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, NoReturn

from titanlite.ground.errors import UserError
from titanlite.launch import children, stop

# A terminal's Ctrl-C and a scheduler's signals reach every process of a run. The fork server ignores them. A rank receives them
# when it unblocks them, also those that were sent before.
_BLOCKED = (*stop.SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Child(NamedTuple):
    """A process of the fork server, with the part of subprocess.Popen's interface that the launcher needs."""

    pid: int
    poll: Callable[[], int | None]  # the exit code, negative for a signal; None while the process runs


class ForkServer:
    """Starts processes; create it in the main thread, outside of any `try`: new processes leave by SystemExit through it."""

    def __init__(self, *preload: str):
        """preload: modules that the processes share."""
        self._exit_codes: dict[int, int | None] = {}
        self._connection, requests = Pipe()
        launcher = os.getpid()
        if (pid := os.fork()) == 0:
            self._connection.close()
            children.end_with_parent(launcher)
            _serve(requests, preload)
        requests.close()
        self._pid = pid

    def close(self) -> None:
        """Ends the server, and with it any process that is left."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def start(self, function: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None) -> Child:
        """Starts a process that exits with what the function returns for the arguments. All of them are pickled.

        Raises UserError if the machine has no memory, or no process id, for another process.
        """
        pid = self._request((function, arguments, environment or {}))
        if isinstance(pid, OSError):
            raise UserError(f"the machine cannot start another process, for a rank: {pid.strerror}; lower NGPU, or its limits")
        return Child(pid, functools.partial(self._exit_code, pid))

    def _exit_code(self, pid: int) -> int | None:
        if self._exit_codes.get(pid) is None:
            self._exit_codes[pid] = self._request(pid)
        return self._exit_codes[pid]

    def _request(self, request: Any) -> Any:
        try:
            self._connection.send(request)
            return self._connection.recv()
        except (EOFError, OSError):  # somebody has killed the fork server; the kernel then ends its processes
            raise SystemExit("the process that starts the ranks is gone; the run is over") from None


def _serve(requests: Connection, preload: tuple[str, ...]) -> NoReturn:
    """Answers requests for new processes with their pid, and a pid with its exit code, or None while the process runs.

    A process that has ended stays a zombie until then: the launcher never signals a pid that is somebody else's by now.
    Returns in no process: the server exits with the launcher, and a new process with its function's result.
    """
    os.setsid()
    server = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    # Among modules the garbage collector takes a sixth of their import; in a rank it would copy the memory shared with others.
    gc.disable()
    for module in preload:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    running: list[int] = []
    while True:
        try:
            request = requests.recv()
        except EOFError:  # the launcher has ended
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            if ended:
                running.remove(request)
            requests.send(os.waitstatus_to_exitcode(status) if ended else None)
            continue
        function, arguments, environment = request
        try:
            pid = os.fork()
        except OSError as error:
            requests.send(error)
            continue
        if pid == 0:
            children.end_with_parent(server)
            requests.close()
            os.setsid()
            os.environ.update(environment)
            sys.exit(function(*arguments))
        running.append(pid)
        requests.send(pid)
