"""Starts child processes, and ends them with their parent. Imports no slow modules."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Collection, Iterator
from multiprocessing import resource_tracker

from titanlite.ground.errors import UserError

# What a terminal, or a scheduler, may send to every process of a run, and the process that started a worker reacts to.
TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def end_with_parent(parent: int | None = None) -> None:
    """On Linux, the kernel ends this process when the one that started it dies, even by SIGKILL.

    parent: its pid. If it has died before this call, this process exits at once.
    """
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def name_process(name: str) -> None:
    """On Linux, the name of this process in ps, top and /proc/PID/comm; at most 15 characters."""
    if sys.platform == "linux":
        set_name = 15  # PR_SET_NAME
        ctypes.CDLL(None).prctl(set_name, name.encode())


def end_with_starter() -> None:
    """Ends a process of multiprocessing's fork server when the process that requested it is gone, even by SIGKILL.

    Its parent is the fork server, which lives as long as any of its processes does.
    """
    starter = multiprocessing.parent_process()  # the process that requested this one
    assert starter is not None

    def wait() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end with the starter").start()


@contextlib.contextmanager
def starting(blocked_signals: Collection[int]) -> Iterator[None]:
    """Around the start of workers by multiprocessing: they never receive some signals, and do not import the main module.

    Ctrl-C reaches every process of a terminal, a scheduler's signal every process of a job: such signals are blocked in the
    workers from their first moment, and this process ends them. The main module may be a user's script.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
    resource_tracker.ensure_running()  # multiprocessing's own process, which blocks them too; its start unblocks some here
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
    # Threads of libraries receive them all the same, and Python would run its handlers here, in the middle of a start.
    noted: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in blocked_signals if in_main}
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in set(noted):
            signal.raise_signal(number)


@contextlib.contextmanager
def naming_long_folder() -> Iterator[None]:
    """Around the start of multiprocessing's fork server: UserError if TMPDIR is too long for the path of its socket."""
    try:
        yield
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        what = f"TMPDIR={tempfile.gettempdir()}: is too long for the socket of worker processes"
        raise UserError(f"{what}; set it to a folder whose path has at most 75 characters") from None
