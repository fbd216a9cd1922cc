"""Writes files and folders that appear under their name complete or not at all, synced to the disk; and the cache's folder."""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from titanlite.ground.errors import UserError

log = logging.getLogger(__name__)

Item = TypeVar("Item")
UNFINISHED = ".tmp"  # behind the name of a file that is being written


def replace_file(path: Path, text: str) -> None:
    """Writes a text file atomically: a reader, or a kill, finds the old text or the new one."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with open(unfinished, "w", encoding="utf-8", opener=_open_regular) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def append(path: Path) -> int:
    """Opens a file to add to it; -> handle. By its name each time: somebody may have moved what it named before (logrotate)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _open_regular(path: str | Path, flags: int) -> int:
    """Opens a file to write it. Neither waits for the reader of a FIFO nor follows a link."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is what its path still names: nobody has removed, renamed or replaced it."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


class Kept:
    """An open file of a run; `keep` makes it again where somebody has removed or replaced it."""

    def __init__(self, path: Path, make: Callable[[], int]):
        """make: opens the file, and creates it where it is missing; -> handle."""
        self.path, self._make = path, make
        self.handle = make()

    def keep(self) -> None:
        if not is_at(self.handle, self.path):
            log.warning("%s: somebody has removed or replaced it; made again, since the run needs it", self.path)
            with tolerated(self.path):
                before, self.handle = self.handle, self._make()
                os.close(before)

    def close(self) -> None:
        os.close(self.handle)


def kept_text(path: Path, text: str) -> Kept:
    """Writes a text file that the run keeps."""

    def make() -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    return Kept(path, make)


@contextlib.contextmanager
def tolerated(what: object) -> Iterator[None]:
    """Around what a run writes beside its checkpoints: a full disk is logged, and does not end training."""
    try:
        yield
    except OSError as error:
        log.warning("%s: cannot be written: %s; training continues", what, error.strerror or error)


def sync(path: Path) -> None:
    """Syncs a file's contents, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_contents(folder: Path) -> None:
    """Syncs every file of a folder, and their names."""
    for file in folder.iterdir():
        sync(file)
    sync(folder)


@contextlib.contextmanager
def writing(path: Path, remedy: str = "") -> Iterator[None]:
    """Makes an error of the disk a UserError that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}{remedy}") from None


def unfinished_path(final: Path) -> Path:
    """Where a file or folder is written before it is complete."""
    return final.with_name(f".{final.name}.unfinished")


def start_output(output: Path) -> Path:
    """Makes `unfinished_path` free, which is returned. Raises UserError where the output exists, or cannot be written."""
    if output.exists():
        raise UserError(f"{output}: already exists; name another output, or remove it")
    unfinished = unfinished_path(output)
    if (unfinished / "plan.json").is_file():
        raise UserError(f"{output}: titanlite tokenize is not finished there; name another output")
    with writing(output):
        if unfinished.is_dir():
            shutil.rmtree(unfinished)  # left by a killed command
        output.parent.mkdir(parents=True, exist_ok=True)
    return unfinished


def publish(unfinished: Path, final: Path) -> None:
    """Renames a complete file or folder; its contents and its name are on the disk at return."""
    sync(unfinished)
    unfinished.rename(final)
    sync(final.parent)


def split(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> list[list[Item]]:
    """What goes into each of several files: consecutive items of at most `limit` bytes together, or one larger item."""
    files: list[list[Item]] = []
    size = 0
    for item in items:
        if not files or size + size_of(item) > limit:
            files.append([])
            size = 0
        files[-1].append(item)
        size += size_of(item)
    return files


def cache_folder() -> Path:
    """$TITANLITE_CACHE, else titanlite/ in the user's cache folder. Raises UserError for a user without a home folder."""
    if own := os.environ.get("TITANLITE_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"
    except RuntimeError as error:
        raise UserError(f"no folder for titanlite's cache: {error}; set TITANLITE_CACHE to one") from None
