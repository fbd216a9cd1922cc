"""The one handler for unexpected exceptions, in every command and every rank.

The screen shows one line: the position, the error, the file that was read last, and the file with the traceback. Below it are
the frames of the user's own code, if there are any. A full disk does not prevent the report.
"""

import contextlib
import errno
import os
import re
import tempfile
import time
import traceback
from pathlib import Path

from titanlite.ground import errors
from titanlite.ground.errors import is_users, where
from titanlite.ground.files import Kept

_DEFECT, _CORRECTABLE = 1, 2  # exit codes
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}


def code_of(error: BaseException) -> int:
    """The exit code: 2 where the machine has no memory, space or permission left, else 1."""
    correctable = ran_out(error) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE)
    return _CORRECTABLE if correctable else _DEFECT


def ran_out(error: BaseException) -> bool:
    """Whether an allocator of PyTorch, CUDA, NCCL or Python had no memory left."""
    known = ("out of memory", "can't allocate memory", "cannot allocate memory")
    memory = isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in known)
    return memory or isinstance(error, MemoryError)


def report(error: BaseException, who: str, dump: Kept | None = None, words: str = "") -> str:
    """The text for the screen; the traceback is written to a file.

    who: the command or rank. dump: the file for it; None: one in the temporary folder. words: the error, where the caller has
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
    parts += [f"traceback: {file}"] if file else ["the traceback could not be written to a file; it follows"]
    return "\n".join(["; ".join(parts), "".join(traceback.format_list(own)) if file else trace]).rstrip()


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def out_of_memory(error: BaseException) -> str:
    """The words for an error of `ran_out`."""
    requested = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    return "out of memory" + (f", {requested[1]} more were requested" if requested else "")


def _words(error: BaseException) -> str:
    if ran_out(error):
        return out_of_memory(error)
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__


def _at(frames: traceback.StackSummary) -> str:
    """The innermost line in titanlite or in the user's code."""
    package = os.path.dirname(os.path.dirname(__file__))
    ours = [frame for frame in frames if is_users(frame.filename) or frame.filename.startswith(package)]
    return f" ({ours[-1].filename.removeprefix(os.path.dirname(package) + os.sep)}, line {ours[-1].lineno})" if ours else ""


def _write(text: str, dump: Kept | None) -> Path | None:
    """Writes a text to the dump, else to the temporary folder; -> the file, None where neither can be written."""
    content = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        if dump is not None and os.write(dump.handle, content) == len(content):
            return dump.path
    with contextlib.suppress(OSError):  # the disk is full
        path = Path(tempfile.gettempdir()) / f"titanlite-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.write_bytes(content)
        return path
    return None
