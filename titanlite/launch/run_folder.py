"""The run directory: everything that a run writes in it, its lock, and the record of its starts.

PLACES and OPTIONS list all that a run writes. No two places are one, and the check names a thing of another kind in a place
before anything starts.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlite.config.read import to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError, phase
from titanlite.files import UNFINISHED, replace_file, tolerated
from titanlite.outside import MIB, Absent, Contents, Positive, Unread, kind_of, read_bytes, read_json

log = logging.getLogger(__name__)

LOCK, CONFIG, PROVENANCE = ".lock", "config.toml", "provenance.json"
METRICS, INCIDENTS, STACKS, COLLECTIVES = "metrics.jsonl", "incidents.jsonl", "stacks", "comm_traces"
ROUTING = "routing.json"
_UNREADABLE = f"{PROVENANCE}.unreadable"
_LIMIT = 2048 * MIB  # of provenance.json: a thousand starts, each with 100 KiB of changed code
_PACKAGES = ("titanlite", "torch", "tokenizers", "tensorboard", "pydantic", "numpy", "tqdm")


PLACES = {  # names in the folder of a run -> what is there; a comment says what it holds, and who writes it
    LOCK: "file",  # the process that trains; rank 0 keeps it locked
    CONFIG: "file",  # the resolved configuration of the latest start; rank 0
    PROVENANCE: "file",  # an entry for each start: command, git commit and diff, versions, mesh, data; rank 0
    _UNREADABLE: "file",  # a provenance.json that somebody has edited; rank 0
    METRICS: "file",  # an object for each reported step; rank 0
    ROUTING: "file",  # how many rows each expert of a mixture had, at the latest report; rank 0
    INCIDENTS: "file",  # an object for each spike and each step that was not finite; rank 0
    STACKS: "folder",  # rank-0.txt, ...: where ranks were when something went wrong; each rank, the launcher
    COLLECTIVES: "folder",  # rank_0, ...: NCCL's flight recorder; each rank
}
OPTIONS = (  # keys that name folders there
    "checkpoint.folder",  # checkpoints, exports beside them, what is half written or half deleted; each rank
    "metrics.save_tb_folder",  # TensorBoard's event files; rank 0
    "profiling.save_traces_folder",  # step-00000010/rank-0.json.gz, ...; each rank
    "profiling.save_memory_snapshot_folder",  # step-00000010/rank-0.pickle, ...; each rank
)
_TRACES = {r"step-\d{8,}.*": "folder"}
_INSIDE = {  # regular expressions for the names that a run uses in these folders -> what is there
    STACKS: {"rank-.*": "file"},
    COLLECTIVES: {"rank_.*": "file"},
    "checkpoint.folder": {r"\.?step-\d{8,}(-hf)?(\.unfinished|\.retired)?": "folder", r"\.probe(\.tmp)?": "file"},
    "profiling.save_traces_folder": _TRACES,
    "profiling.save_memory_snapshot_folder": _TRACES,
}


# ----------------------------------------------------------------------------------------------------------------- the check


def faults(config: Config) -> Iterator[str]:
    """A folder that a run cannot write, keys that name one place twice, and things of the wrong kind in places."""
    dump = Path(config.job.dump_folder)
    if fault := _unwritable(dump) or wrong_kind(dump, "folder"):
        yield f'job.dump_folder = "{dump}": {fault}'
        return
    if (dump / CONFIG).is_file() and not os.path.lexists(dump / PROVENANCE):  # which a start writes first
        yield f'job.dump_folder = "{dump}": {dump / CONFIG} is not of a run, which would replace it; name another folder'
    run, taken = Path(os.path.realpath(dump)), dict[Path, str]()  # with links followed; taken: path -> its place
    for label, path, kind, inside in _places(config, dump):
        real = Path(os.path.realpath(path))
        if os.path.relpath(path, dump).split(os.sep)[0] in (".", ".."):
            yield f"{label}: must be a folder inside job.dump_folder"
            continue
        other = next((place for other, place in taken.items() if _overlap(real, other)), "")
        taken.setdefault(real, label)
        if fault := f"leads to the place of {other}; each must have its own" if other else wrong_kind(path, kind):
            yield f"{label}: {fault}"
            continue
        for entry in sorted(path.iterdir()) if inside and path.is_dir() else ():
            kind = next((kind for names, kind in inside.items() if re.fullmatch(names, entry.name)), "")
            if kind and (fault := wrong_kind(entry, kind)):
                yield f"{entry}: {fault}"
            elif kind and entry.is_symlink() and _overlap(Path(os.path.realpath(entry)), run):
                yield f"{entry}: is a link into the run folder; remove it"


def _places(config: Config, dump: Path) -> Iterator[tuple[str, Path, str, dict[str, str]]]:
    """(name in messages, path, kind, entry of _INSIDE) of all that a run writes."""
    for name, kind in PLACES.items():
        for path in (dump / name, dump / (name + UNFINISHED)) if kind == "file" else (dump / name,):
            yield str(path), path, kind, _INSIDE.get(name, {})
    for key in OPTIONS:
        section, name = key.split(".")
        folder = getattr(getattr(config, section), name)
        yield f'{key} = "{folder}"', dump / folder, "folder", _INSIDE.get(key, {})


def _overlap(one: Path, other: Path) -> bool:
    """Whether two paths are the same, or one is inside the other."""
    return one.is_relative_to(other) or other.is_relative_to(one)


def wrong_kind(path: Path, kind: str) -> str:
    """Why a run cannot write at a path what is of a kind, "file" or "folder"; "" where it can.

    A folder may be a link to one. A file must be none: what is elsewhere may be that of another run.
    """
    try:
        state = path.stat() if kind == "folder" else path.lstat()
    except FileNotFoundError:
        return "is a link that leads nowhere; remove it" if path.is_symlink() else ""
    except (OSError, ValueError) as error:  # too long, a loop of links, a zero byte
        return f"cannot be a {kind}: {getattr(error, 'strerror', None) or error}"
    if (found := kind_of(state.st_mode)) != f"a {kind}":
        return f"is {found}, and a run has a {kind} there; move it away"
    if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if kind == "folder" else 0)):
        return "no permission to write in it" if kind == "folder" else "no permission to read and write it"
    return ""


def _unwritable(dump: Path) -> str:
    """Why a run cannot make its folder; "" where it can, or need not."""
    above = next(folder for folder in dump.absolute().parents if os.path.exists(folder))
    fault = "" if os.path.exists(dump) else wrong_kind(above, "folder")
    return f"{above}: {fault}" if fault else ""


# ------------------------------------------------------------------------------------------------------------------ the lock


class RunLock:
    """Holds a run directory until `close`; the lock of a killed process is free.

    The folder itself is locked too, where its file system can do that (NFS cannot): whoever removes the lock file does not let
    a second run in. Elsewhere `keep` finds out.
    """

    def __init__(self, folder: Path):
        """Raises UserError if another run is training in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.whole, self.file = folder, os.open(folder, os.O_RDONLY), -1
        self._take()

    def keep(self) -> None:
        """Makes the lock file again if somebody has removed it. Raises UserError if another run has come in since."""
        with contextlib.suppress(OSError):  # removed
            if os.path.samestat(os.fstat(self.file), os.stat(self.folder / LOCK)):
                return
        log.warning("%s: somebody has removed it; made again, since it keeps a second run out", self.folder / LOCK)
        with contextlib.suppress(OSError):  # it could not be made at the last report either
            os.close(self.file)
        self.file = -1
        with tolerated(self.folder / LOCK):
            self._take()

    def close(self) -> None:
        for handle in {self.whole, self.file} - {-1}:
            os.close(handle)
        self.whole = self.file = -1

    def _take(self) -> None:
        """Opens the lock file, and locks it and the folder."""
        self.file = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        while not (_locked(self.whole, fcntl.LOCK_EX) and _locked(self.file, fcntl.LOCK_EX)):
            for handle in (self.whole, self.file):  # so that of two runs that start together one comes in
                _locked(handle, fcntl.LOCK_UN)
            time.sleep(0.5)  # it may be a check for a moment
            if fault := other_run(self.folder):
                self.close()
                raise UserError(fault)
        os.truncate(self.file, 0)
        os.write(self.file, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _locked(handle: int, how: int) -> bool:
    """Locks a file or folder; whether no other process holds it. A folder that its file system cannot lock counts as locked."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
    return True


def other_run(folder: Path) -> str:
    """The fault if another run is training in a run directory, with its process; or ""."""
    for path in (folder, folder / LOCK):
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # no run has ever been here
            continue
        try:
            if not _locked(handle, fcntl.LOCK_SH):
                return (
                    f'job.dump_folder = "{folder}": another run is training in it ({_holder(folder)}); give this one a folder '
                    "of its own"
                )
        finally:
            os.close(handle)
    return ""


def _holder(folder: Path) -> str:
    """The process that holds a run directory, in words."""
    try:
        return read_bytes(folder / LOCK, 1000).decode(errors="replace")[:100] or "starting"
    except UserError:
        return f"which has lost {folder / LOCK}"


# ---------------------------------------------------------------------------------------------------------------- the record


@phase("recording the start")
def record_start(config: Config, facts: dict[str, Any]) -> None:
    """Writes config.toml and adds an entry to provenance.json: the command, the code, the versions, and `facts`."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROVENANCE
    try:
        starts = read_starts(folder)
    except Unread:
        raise
    except UserError:  # somebody may have edited it: keep it
        shutil.copyfile(path, folder / _UNREADABLE)
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
    replace_file(path, json.dumps(starts, indent=2))
    replace_file(folder / CONFIG, to_toml(config))  # last: without provenance.json, `faults` takes it for a file of the user's


class _Start(Contents):
    """What an entry of provenance.json must hold."""

    time: str
    command: list[str]
    global_batch: Positive | None = None
    model_source: Any = None  # older versions kept a text


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's provenance.json; none where there is no such file. Raises UserError."""
    try:
        return read_json(folder / PROVENANCE, list[_Start], _LIMIT)
    except Absent:
        return []


def _git_state() -> dict[str, str] | None:
    """Commit and uncommitted changes of the code that runs, or None outside of a git checkout."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "diff": git("diff", "HEAD")}
    except (OSError, subprocess.CalledProcessError):
        return None
