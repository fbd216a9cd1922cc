"""The rules for a wrong input: one message that names it refuses it, or the run is correct; nothing is left behind.

A generator yields cases; `judge` runs one in this process, in its own folder, and returns the violations.
"""

import contextlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

from titanlite.ground.errors import UserError

SECONDS = 10.0  # CPU time of this process, for one case


class Case(NamedTuple):
    """One wrong input.

    name: unique within its generator, and the same at every seed that draws it. make: writes the input into an empty folder,
    which is also the working folder, and returns the function that reads it as a user's command does. names: a pattern that the
    message must have, such as the key or the file. right: whether the input may also be accepted; the action then raises
    AssertionError if the result is not correct.
    """

    name: str
    make: Callable[[Path], Callable[[], object]]
    names: str
    right: bool = False


def judge(case: Case, folder: Path) -> list[str]:
    """The violations of a case, as text; none if all rules hold. folder: empty."""
    resource_tracker.ensure_running()  # a process of multiprocessing that persists
    before_children = _children()
    with working_in(folder):
        action = case.make(folder)
        before = _contents(folder)
        begun = time.process_time()
        message, faults = _message_of(action)
        seconds = time.process_time() - begun
    if message is None and not case.right and not faults:
        faults.append("accepted")
    if message is not None:
        if not re.search(case.names, message):
            faults.append(f"the message does not name {case.names!r}: {message!r}")
        if "Traceback" in message:
            faults.append(f"a traceback: {message!r}")
        if not message.strip():
            faults.append("refused without a message")
        changed = [path for path, state in _contents(folder).items() if before.get(path) != state]
        if changed:
            faults.append(f"written: {', '.join(changed)}")
    if seconds > SECONDS:
        faults.append(f"took {seconds:.1f} s")
    if left := _children() - before_children:
        faults.append(f"processes are left: {sorted(left)}")
    return faults


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _message_of(action: Callable[[], object]) -> tuple[str | None, list[str]]:
    """(the message of a refusal, None if there was none; faults in how it ended)."""
    error_output = io.StringIO()
    try:
        with contextlib.redirect_stderr(error_output), contextlib.redirect_stdout(io.StringIO()):
            action()
    except UserError as error:
        return str(error), []
    except SystemExit as ended:
        if ended.code in (None, 0):
            return None, []
        text = ended.code if isinstance(ended.code, str) else error_output.getvalue()
        return text, [] if ended.code == 2 else [f"exit code {ended.code}"]
    except AssertionError as wrong:
        return None, [f"accepted, with a wrong result: {wrong}"]
    except Exception as error:  # any other exception is a fault
        return None, [f"{type(error).__name__}: {error}"]
    return None, []


def _contents(folder: Path) -> dict[str, tuple[int, int, int]]:
    """path -> (inode, size, time of change) of everything in a folder."""
    return {
        str(path.relative_to(folder)): (state.st_ino, state.st_size if path.is_file() else 0, state.st_mtime_ns)
        for path in folder.rglob("*")
        for state in [path.lstat()]
        if not path.is_dir()
    }


def _children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
