"""Reports a rank that fails, and dumps the stacks of the others.

<dump_folder>/stacks/rank-3.txt is written when something goes wrong; later starts append to it. What begins with

    ==== <time> rank 3, step 37, forward and backward (process 123): <error>     was written by a rank that failed,
    ==== <time> rank 3 (process 123): <why the launcher ends this rank>          by one that was still running,
    Fatal Python error: Aborted                                                  by one that C++ code ended,
    Thread 0x... or Current thread 0x... on its own                              at `kill -QUIT 123`.

Stacks of threads begin with the innermost call. They come from Python's faulthandler, which is a signal handler in C: a rank
that is stuck in a collective writes them too.
"""

import contextlib
import faulthandler
import functools
import logging
import os
import re
import signal
import time
from pathlib import Path

from titanlite.ground.files import Kept, append
from titanlite.ground.run_files import STACKS
from titanlite.launch import failure, process

log = logging.getLogger("titanlite")

# The launcher waits until no rank's dump has grown for _INTERVAL seconds; a dump takes milliseconds on a free core.
_INTERVAL = 0.5
_LONGEST = 5.0

ECHO = 3  # exit code after an error that another rank has probably caused: the launcher names that one

_dump: Kept | None = None


def folder_of(dump_folder: Path) -> Path:
    return dump_folder / STACKS


# ---------------------------------------------------------------------------------------------------------------- a rank


def open_dump(dump_folder: Path, rank: int) -> None:
    """From now on this rank leaves its stacks at SIGQUIT, when it crashes, and in `report`. `close_dump` must follow.

    Call it after rank 0 has the lock of the run directory: the ranks of another run write to the same files.
    """
    global _dump
    path = file_of(dump_folder, rank)
    _dump = Kept(path, functools.partial(_open, path))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGQUIT,))  # blocked by the launcher until here


def _open(path: Path) -> int:
    handle = append(path)
    faulthandler.enable(handle)
    faulthandler.register(signal.SIGQUIT, handle, all_threads=True, chain=False)
    return handle


def keep() -> None:
    """Opens the file of `open_dump` again if somebody has removed or replaced it."""
    if _dump is not None:
        _dump.keep()


def close_dump() -> None:
    """Removes the file of `open_dump` if nothing went wrong."""
    global _dump
    if _dump is None:
        return
    faulthandler.disable()
    faulthandler.unregister(signal.SIGQUIT)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # the launcher may still send it; the default action is a core dump
    _dump.close()
    path, _dump = _dump.path, None
    remove_empty([path])


def report(error: Exception, patience: float = 0.0) -> int:
    """Logs where this rank is and what went wrong; the traceback and the stacks of all threads go to its dump. -> exit code

    patience: seconds to wait before logging an error that another rank probably caused, so that the cause is logged first.
    """
    echo = _echo(error)
    text = failure.report(error, f"rank {process.rank_and_world()[0]}", _dump, echo)
    if _dump is not None:
        faulthandler.dump_traceback(_dump.handle, all_threads=True)
    if echo:
        time.sleep(patience)
    log.error("%s", text)
    return ECHO if echo and not failure.ran_out(error) else failure.code_of(error)


def _echo(error: Exception) -> str:
    """Words for an error that another rank probably caused, by a lost connection or a timeout; "" for any other error.

    gloo raises a plain RuntimeError for both, and PyTorch's store and NCCL classes derived from it.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""  # of others, the text may be an error itself
    if not re.search("connection|gloo|timed out|timeout|socket", text, re.IGNORECASE):
        return ""
    if waited := re.search(r"(?:timed out waiting|timeout after) (\d+) ?ms", text, re.IGNORECASE):
        return f"waited {int(waited[1]) / 1000:g} s for the other ranks"
    if re.search(r"connection (closed|reset|refused)|broken pipe", text, re.IGNORECASE):
        return "lost the connection to another rank"
    return failure.first_line(error)


# ---------------------------------------------------------------------------------------------------------- the launcher


def request(dump_folder: Path, processes: dict[int, int], why: str) -> None:
    """Makes running ranks write their stacks, and waits for that, `_LONGEST` seconds at most. processes: rank -> process.

    A rank that has not reached `open_dump` writes nothing.
    """
    before = {}
    for rank, pid in processes.items():
        path = file_of(dump_folder, rank)
        if path.exists():
            with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:  # on a full disk
                file.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} (process {pid}): {why}\n")
            before[path] = path.stat().st_size
    for pid in processes.values():
        os.kill(pid, signal.SIGQUIT)
    deadline, sizes = time.monotonic() + _LONGEST, before
    while before and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
        last, sizes = sizes, {path: path.stat().st_size for path in before}
        if sizes == last and all(sizes[path] > before[path] for path in before):
            return


# -----------------------------------------------------------------------------------------------------------------------


def file_of(dump_folder: Path, rank: int) -> Path:
    return folder_of(dump_folder) / f"rank-{rank}.txt"


def remove_empty(paths: list[Path]) -> None:
    """Removes empty dumps: of ranks that had no error, or were killed."""
    for path in paths:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
    with contextlib.suppress(OSError):  # gone already, or with files of other ranks
        paths[0].parent.rmdir()
