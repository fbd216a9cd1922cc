"""The run directory: the check of its names, its lock, and the record of its starts."""

import contextlib
import errno
import fcntl
import functools
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlite.config.read import to_toml
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, phase
from titanlite.ground.files import Kept, kept_text, writing
from titanlite.ground.run_files import ASIDE, COLLECTIVES, CONFIG, INCIDENTS, LOCK, METRICS, PROVENANCE, STACKS, read_starts
from titanlite.ground.untrusted import Unread, read_bytes

log = logging.getLogger(__name__)

_NAMES = (LOCK, CONFIG, PROVENANCE, METRICS, ASIDE, INCIDENTS, STACKS, COLLECTIVES)
_OPTIONS = (  # keys that name folders there
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)
_AS_A_PATCH = ("--no-ext-diff", "--no-textconv", "--no-color")  # whatever the user has configured git to show
_PACKAGES = ("titanlite", "torch", "torchdata", "tokenizers", "tensorboard", "pydantic", "numpy", "tqdm")


# ----------------------------------------------------------------------------------------------------------------- the check


def faults(config: Config) -> Iterator[str]:
    """A folder that a run cannot write, checkpoints of another run, and keys that name what the run writes elsewhere."""
    if "://" in config.job.dump_folder:  # a run made a folder "s3:"
        remedy = "a run needs a file system; copy finished checkpoints, which never change"
        yield f'job.dump_folder = "{config.job.dump_folder}": must be a folder, and is a URL; {remedy}'
        return
    if config.job.dump_folder.startswith("~"):  # a run made a folder "~"
        yield f'job.dump_folder = "{config.job.dump_folder}": only a shell replaces ~ by the home folder; write the whole path'
        return
    dump = Path(config.job.dump_folder)
    if fault := _unwritable(dump):
        yield f'job.dump_folder = "{dump}": {fault}'
        return
    if (dump / CONFIG).is_file() and not os.path.lexists(dump / PROVENANCE):  # which a start writes first
        yield f'job.dump_folder = "{dump}": {dump / CONFIG} is not of a run, which would replace it; name another folder'
    if owner := _owner(config):
        folder = dump / config.checkpoint.folder
        yield f"{folder}: leads to the checkpoints of the run in {owner}; replace the link by a folder of this run's own"
    taken = {Path(name): name for name in _NAMES}
    for key in _OPTIONS:
        section, name = key.split(".")
        folder = getattr(getattr(config, section), name)
        path = Path(os.path.normpath(folder))
        if "://" in folder or path.is_absolute() or path.parts[:1] in ((), ("..",)):
            yield f'{key} = "{folder}": must be a folder inside job.dump_folder'
            continue
        if other := next((taken[known] for known in taken if path.is_relative_to(known) or known.is_relative_to(path)), ""):
            yield f'{key} = "{folder}": is already used by {other}; each needs a folder of its own'
        elif fault := _unwritable(dump / path):
            yield f'{key} = "{folder}": {fault}'
        taken.setdefault(path, f'{key} = "{folder}"')


def _unwritable(folder: Path) -> str:
    """Why a run cannot make a folder, or write in it; "" where it can."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not above.is_dir():
        return f"{above}: is not a folder"
    return "" if os.access(above, os.R_OK | os.W_OK | os.X_OK) else f"{above}: no permission to write in it"


# ------------------------------------------------------------------------------------------------------------------ the lock


def owned_folders(config: Config) -> list[Path]:
    """The folders that one run alone may write: its own, and that of its checkpoints, which may be a link to another disk."""
    dump = Path(config.job.dump_folder)
    return [dump, dump / config.checkpoint.folder] if config.checkpoint.enable else [dump]


class RunLock:
    """Holds folders until `close`, by an flock of a file in each; that of a killed process is free.

    Of a file, since on NFS the flock of a folder reaches no other node. Whoever removes it lets a second run in, and `keep` of
    the first one finds out.
    """

    def __init__(self, *folders: Path):
        """Raises UserError if another run is training in one of them, or if it cannot be written. The first: the run folder."""
        self._held: list[Kept] = []
        try:
            for folder in folders:
                with writing(folder):
                    self._held.append(Kept(folder / LOCK, functools.partial(_take, folder, folders[0])))
        finally:
            if len(self._held) < len(folders):
                self.close()

    def keep(self) -> None:
        """Makes lock files again if somebody has removed them. Raises UserError if another run has come in since."""
        for file in self._held:
            file.keep()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()


def _take(folder: Path, run: Path) -> int:
    """Locks the file of a folder; -> its handle. Raises UserError if another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        while not _locked(handle, fcntl.LOCK_EX):
            if fault := other_run(folder):
                raise UserError(fault)
            time.sleep(0.1)  # a check has it for a moment
        os.truncate(handle, 0)
        paths = (os.path.abspath(run), os.path.abspath(folder))
        os.write(handle, "\n".join((f"process {os.getpid()} on {socket.gethostname()}", *paths)).encode())
    except BaseException:
        os.close(handle)
        raise
    return handle


def _locked(handle: int, how: int) -> bool:
    """Locks a file; whether no other process holds it, or the file system cannot say."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        if how == fcntl.LOCK_EX:
            _warn_of_no_locks(os.strerror(error.errno))
    return True


@functools.cache  # once
def _warn_of_no_locks(why: str) -> None:
    log.warning("job.dump_folder: its file system has no locks (%s): nothing keeps two runs from training in one folder", why)


def other_run(folder: Path) -> str:
    """A fault that names the process of another run that is training in a folder; "" where there is none."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:  # no run has ever been here
        return ""
    try:
        if _locked(handle, fcntl.LOCK_SH):
            return ""
    finally:
        os.close(handle)
    return f"{folder}: another run is training in it ({_holder(folder)[0]}); give this one a job.dump_folder of its own"


def _holder(folder: Path) -> list[str]:
    """The lines of a folder's lock file: the process that holds or has held it, its run folder, and the path of this folder."""
    try:
        lines = read_bytes(folder / LOCK, 10_000).decode(errors="replace").splitlines()
    except UserError:
        return [f"which has lost {folder / LOCK}"]
    return lines or ["starting"]


def _owner(config: Config) -> str:
    """Another run that has the same folder for its checkpoints, by a link; "" where there is none.

    A copied run has a copy of the lock file, whose owner has another folder; that of a moved run names a folder that is gone.
    """
    run, *folders = owned_folders(config)
    for folder in folders:
        _, *locations = _holder(folder)
        with contextlib.suppress(OSError, ValueError):
            theirs, location = locations
            if os.path.samefile(location, folder) and not os.path.samefile(theirs, run):
                return theirs
    return ""


# ---------------------------------------------------------------------------------------------------------------- the record


@phase("recording the start")
def record_start(config: Config, facts: dict[str, Any]) -> list[Kept]:
    """Writes config.toml and adds an entry to provenance.json: the command, the code, the versions, and `facts`; -> both."""
    folder = Path(config.job.dump_folder)
    path = folder / PROVENANCE
    try:
        starts = read_starts(folder)
    except Unread:
        raise
    except UserError:  # keep a file that somebody has edited
        shutil.copyfile(path, folder / f"{PROVENANCE}.unreadable")
        starts = []
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "git": _git_state(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
            "versions": {found.name: found.version for found in importlib.metadata.distributions() if found.name in _PACKAGES},
            **facts,
        }
    )
    record = kept_text(path, json.dumps(starts, indent=2))
    # after it: `faults` takes a configuration without provenance.json for the user's
    return [record, kept_text(folder / CONFIG, to_toml(config))]


def _git_state() -> dict[str, str] | None:
    """Commit and uncommitted changes of the code that runs, or None outside of a git checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        # also of another user, as in a container; but not one around the folder where titanlite is installed
        command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "diff": git("diff", *_AS_A_PATCH, "HEAD")}
    except (OSError, subprocess.CalledProcessError):
        return None
