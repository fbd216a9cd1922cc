"""What is made once and kept: tokens of the user's text, the default tokenizer, packings of token files."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from titanlite.errors import UserError

Made = TypeVar("Made")


def once(path: Path, make: Callable[[Path], None], read: Callable[[Path], Made]) -> Made:
    """What `read` finds at `path`, which `make` makes if it is not there: one process does, others wait, whole or not at all.

    A file that cannot be read is made again. Raises UserError where the cache folder cannot be written.
    """
    with contextlib.suppress(Exception):  # not there, or damaged: both are mended below
        return read(path)
    with making(path):
        with contextlib.suppress(Exception):  # another process has made it meanwhile
            return read(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            make(unfinished)
            with open(unfinished, "rb") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return read(path)


@contextlib.contextmanager
def making(path: Path) -> Iterator[None]:
    """While this lasts no other process makes what is to be at `path`. Raises UserError where nothing can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}; TITANLITE_CACHE names another folder for it") from None


def digest(*parts: str) -> str:
    """A name for what follows from these texts."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
