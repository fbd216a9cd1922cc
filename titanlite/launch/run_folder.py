"""The run directory: what is needed to know what a run was, and to repeat it.

<dump_folder>/config.toml      the resolved configuration of the latest start
              provenance.json  one entry per start: command, git commit and diff, versions, mesh, data
              metrics.jsonl    one object per reported step
              tb/              TensorBoard
              checkpoint/      step-00000100/ ...
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from titanlite.config.read import to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.files import replace_file
from titanlite.outside import MIB, Absent, Contents, Positive, read_json

_LOCK = ".lock"
_LIMIT = 2048 * MIB  # of provenance.json: a thousand starts, each with 100 KiB of changed code
_PACKAGES = ("titanlite", "torch", "tokenizers", "tensorboard", "pydantic", "numpy", "tqdm")


def lock_run(folder: Path) -> IO[str]:
    """Locks the run directory until the returned file is closed; the lock of a killed process is free.

    Raises UserError if another run is training in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / _LOCK, "a+")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.5)  # it may be a check for a moment: `other_run`
            if fault := other_run(folder):
                file.close()
                raise UserError(fault) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def other_run(folder: Path) -> str:
    """The fault if another run is training in a run directory, with its process; or ""."""
    if not (folder / _LOCK).is_file():
        return ""  # no run has ever been here
    with open(folder / _LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read() or "starting"
            return f'job.dump_folder = "{folder}": another run is training in it ({holder}); give this one a folder of its own'
    return ""


def record_start(config: Config, facts: dict[str, Any]) -> None:
    """Writes config.toml and adds an entry to provenance.json: the command, the code, the versions, and `facts`."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.toml", to_toml(config))
    path = folder / "provenance.json"
    try:
        starts = read_starts(folder)
    except UserError:  # somebody may have edited it: keep it
        path.rename(path.with_suffix(".json.unreadable"))
        starts = []
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "git": _git_state(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
            "versions": {name: _version(name) for name in _PACKAGES},
            **facts,
        }
    )
    replace_file(path, json.dumps(starts, indent=2))


class _Start(Contents):
    """What an entry of provenance.json must hold."""

    time: str
    command: list[str]
    global_batch: Positive | None = None
    model_source: Any = None  # older versions kept a text


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's provenance.json; none where there is no such file. Raises UserError."""
    try:
        return read_json(folder / "provenance.json", list[_Start], _LIMIT)
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def faults(config: Config) -> Iterator[str]:
    """Folders that a run cannot write, or must not."""
    dump = Path(config.job.dump_folder)
    existing = next(folder for folder in (dump, *dump.absolute().parents) if folder.exists())
    if not existing.is_dir():
        yield f'job.dump_folder = "{dump}": {existing} is a file'
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f'job.dump_folder = "{dump}": no permission to write in {existing}'
    for key, name in (
        ("checkpoint.folder", config.checkpoint.folder),
        ("metrics.save_tb_folder", config.metrics.save_tb_folder),
        ("profiling.save_traces_folder", config.profiling.save_traces_folder),
        ("profiling.save_memory_snapshot_folder", config.profiling.save_memory_snapshot_folder),
    ):
        if Path(name) == Path() or Path(name).is_absolute() or ".." in Path(name).parts:
            yield f'{key} = "{name}": must be a folder inside job.dump_folder'
    if Path(config.checkpoint.folder) == Path(config.metrics.save_tb_folder):
        yield f'checkpoint.folder = "{config.checkpoint.folder}": is metrics.save_tb_folder too; the two must differ'
