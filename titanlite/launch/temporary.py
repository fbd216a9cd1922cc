"""The temporary folder of one start: what torch, multiprocessing and others leave there goes with it.

They remove their folders in processes that end by themselves, and the launcher ends ranks by SIGKILL.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "tl-"  # short, as a path of a socket has at most 107 characters
_LONGEST = 75  # characters of the folder; multiprocessing appends 32 for its sockets


def open_folder() -> Path | None:
    """Makes a folder that is $TMPDIR of this process and its children; -> it. None where its path would be too long.

    The lock on it lasts as long as one of these processes. Removes the folders of starts that were killed.
    """
    parent = Path(tempfile.gettempdir())
    for path in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(path)
    if len(str(parent)) + len(_PREFIX) + 9 > _LONGEST:
        return None
    unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))  # under this name, another start does not take it for left
    fcntl.flock(os.open(unlocked, os.O_RDONLY), fcntl.LOCK_EX)
    folder = unlocked.rename(parent / unlocked.name[1:])
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(parent / f"torchinductor_{os.getuid()}"))  # which outlasts a start
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


def _remove_if_left(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or removed meanwhile
        return
    try:
        if os.fstat(handle).st_uid == os.getuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:  # its start goes on
        pass
    finally:
        os.close(handle)
