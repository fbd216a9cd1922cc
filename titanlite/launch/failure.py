"""The one handler for exceptions that nobody has foreseen, in every command and every rank.

The screen shows one line: where, what, the file that was read last, and the file with the traceback; below it are
the frames of the user's own code, if there are any. A full disk or a lost home folder does not keep it from reporting.
"""

import contextlib
import errno
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from titanlite.ground import errors
from titanlite.ground.errors import is_users, where
from titanlite.ground.files import cache_folder

_DEFECT, _CORRECTABLE = 1, 2  # exit codes
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}


def code_of(error: BaseException) -> int:
    """The exit code: 2 where the machine has no memory, space or permission left, else 1."""
    correctable = ran_out(error) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE)
    return _CORRECTABLE if correctable else _DEFECT


def ran_out(error: BaseException) -> bool:
    """Whether an allocator of PyTorch, CUDA, NCCL or Python had no memory left."""
    known = ("out of memory", "can't allocate memory", "cannot allocate memory")
    memory = isinstance(error, RuntimeError | OSError) and any(words in _text(error).lower() for words in known)
    return memory or isinstance(error, MemoryError)


def report(error: BaseException, who: str, dump: tuple[Path, int] | None = None, words: str = "") -> str:
    """The text for the screen; the traceback is written to a file.

    who: the command or rank. dump: (path, handle) of a file that is open for it. words: the error, where the caller has
    described it; frames are then left out.
    """
    trace = "".join(traceback.format_exception(error))
    file = _write(
        f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {where(who)} (process {os.getpid()}): {first_line(error)}\n{trace}", dump
    )
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename) and not words]
    parts = [f"{where(who)}: {words or _words(error) + _at(frames)}"]
    parts += [f"read last: {errors.last_file}"] if errors.last_file else []
    parts += [f"traceback: {file}"] if file else ["no disk takes the traceback, which follows"]
    return "\n".join(["; ".join(parts), "".join(traceback.format_list(own)) if file else trace]).rstrip()


def first_line(error: BaseException) -> str:
    return next(iter(_text(error).splitlines()), type(error).__name__)


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception as second:  # a class of the user's own
        return f"it has no text: {type(second).__name__}"


def out_of_memory(error: BaseException) -> str:
    """The words for an error of `ran_out`."""
    requested = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", _text(error))
    return "out of memory" + (f", {requested[1]} more were requested" if requested else "")


def _words(error: BaseException) -> str:
    if ran_out(error):
        return out_of_memory(error)
    return f"{type(error).__name__}: {first_line(error)}" if _text(error) else type(error).__name__


def _at(frames: traceback.StackSummary) -> str:
    """The innermost place in titanlite or in the user's code."""
    package = os.path.dirname(os.path.dirname(__file__))
    ours = [frame for frame in frames if is_users(frame.filename) or frame.filename.startswith(package)]
    return f" ({ours[-1].filename.removeprefix(os.path.dirname(package) + os.sep)}, line {ours[-1].lineno})" if ours else ""


def _write(text: str, dump: tuple[Path, int] | None) -> Path | None:
    """Writes a text where there is a place for it; -> the file."""
    content = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        if dump is not None and os.write(dump[1], content) == len(content):
            return dump[0]
    for folder in (lambda: cache_folder() / "failures", lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):  # the disk is full, or there is no home folder
            path = folder() / f"titanlite-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            return path
    return None


def watch_threads() -> None:
    """Reports exceptions that end a thread of this process, such as TensorBoard's, the same way."""
    threading.excepthook = _of_thread


def _of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        print(report(ended.exc_value, f"thread {ended.thread.name if ended.thread else 'unknown'}"), file=sys.stderr)
