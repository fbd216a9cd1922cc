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
from titanlite.files import UNFINISHED, Kept, is_at, tolerated
from titanlite.outside import MIB, Absent, Contents, Positive, Unread, kind_of, read_bytes, read_json

log = logging.getLogger(__name__)

LOCK, CONFIG, PROVENANCE = ".lock", "config.toml", "provenance.json"
METRICS, INCIDENTS, STACKS, COLLECTIVES = "metrics.jsonl", "incidents.jsonl", "stacks", "comm_traces"
ROUTING = "routing.json"
_UNREADABLE = f"{PROVENANCE}.unreadable"
_LIMIT = 2048 * MIB  # of provenance.json: a thousand starts, each with 100 KiB of changed code
_PACKAGES = ("titanlite", "torch", "torchdata", "tokenizers", "tensorboard", "pydantic", "numpy", "tqdm")


PLACES = {  # names in the folder of a run -> what is there; a comment says what it holds, and who writes it
    LOCK: "file",  # the process that trains, also in the folder of checkpoints; rank 0 keeps both locked
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
    "checkpoint.folder": {r"\.?step-\d{8,}(-hf)?(\.unfinished|\.retired)?": "folder", r"\.probe(\.tmp)?|\.lock": "file"},
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
    if owner := _owner(config):
        folder = dump / config.checkpoint.folder
        yield f"{folder}: leads to the checkpoints of the run in {owner}; replace the link by a folder of this run's own"
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


def written(config: Config) -> list[Path]:
    """The folders that one run alone may write: its own, and that of its checkpoints, which may be a link to another disk."""
    dump = Path(config.job.dump_folder)
    return [dump, dump / config.checkpoint.folder] if config.checkpoint.enable else [dump]


class RunLock:
    """Holds folders until `close`, by an flock of a file in each; that of a killed process is free.

    Of a file, since on NFS the flock of a folder reaches no other node. Whoever removes it lets a second run in, and `keep` of
    the first one finds out.
    """

    def __init__(self, *folders: Path):
        """Raises UserError if another run is training in one of them. The first is the run folder."""
        self.folders, self.held = folders, dict[Path, int]()
        try:
            for folder in folders:
                self._take(folder)
        except BaseException:
            self.close()
            raise

    def keep(self) -> None:
        """Makes lock files again if somebody has removed them. Raises UserError if another run has come in since."""
        for folder, handle in [*self.held.items()]:
            if not is_at(handle, folder / LOCK):
                log.warning("%s: somebody has removed it; made again, since it keeps a second run out", folder / LOCK)
                with tolerated(folder / LOCK):
                    self._take(folder)
                    os.close(handle)

    def close(self) -> None:
        for handle in self.held.values():
            os.close(handle)
        self.held = {}

    def _take(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            while not _locked(handle, fcntl.LOCK_EX):
                if fault := other_run(folder):
                    raise UserError(fault)
                time.sleep(0.1)  # a check has it for a moment
            os.truncate(handle, 0)
            places = (os.path.abspath(self.folders[0]), os.path.abspath(folder))
            os.write(handle, "\n".join((f"process {os.getpid()} on {socket.gethostname()}", *places)).encode())
        except BaseException:
            os.close(handle)
            raise
        self.held[folder] = handle


def _locked(handle: int, how: int) -> bool:
    """Locks a file; whether no other process holds it."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def other_run(folder: Path) -> str:
    """The fault if another run is training in a folder, with its process; or ""."""
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
    """What the lock file of a folder says: the process that holds or has held it, its run folder, and the name of this one."""
    try:
        lines = read_bytes(folder / LOCK, 10_000).decode(errors="replace").splitlines()
    except UserError:
        return [f"which has lost {folder / LOCK}"]
    return lines or ["starting"]


def _owner(config: Config) -> str:
    """Another run that has the same folder for its checkpoints, by a link; "" where there is none.

    A copied run has a copy of the lock file, whose owner has another folder; that of a moved run names a folder that is gone.
    """
    run, *folders = written(config)
    for folder in folders:
        _, *places = _holder(folder)
        with contextlib.suppress(OSError, ValueError):
            theirs, place = places
            if os.path.samefile(place, folder) and not os.path.samefile(theirs, run):
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
    record = Kept(path, json.dumps(starts, indent=2))
    return [record, Kept(folder / CONFIG, to_toml(config))]  # last: without provenance.json, `faults` takes it for the user's


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
