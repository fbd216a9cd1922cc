"""The run directory: what is needed to know what a run was, and to do it again.

<dump_folder>/config.toml      the resolved configuration of the latest start
              provenance.json  one entry a start: command, git commit and diff, versions, mesh, data
              metrics.jsonl    one object a reported step
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
from pathlib import Path
from typing import IO, Any

import torch

from titanlite.config.read import to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.files import replace_file

_LOCK = ".lock"
_PACKAGES = ("titanlite", "torch", "torchdata", "tokenizers", "tensorboard", "pydantic", "tyro", "numpy", "tqdm")


def lock_run(folder: Path) -> IO[str]:
    """Makes the run directory this process's own while the returned file is open; a killed process holds nothing.

    Raises UserError where another run is training in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / _LOCK, "a+")
    for last in (False, True):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if last:
                file.close()
                raise UserError(
                    f'job.dump_folder = "{folder}": another run is training in it ({other_run(folder)}); '
                    "give this one a folder of its own"
                ) from None
            time.sleep(0.5)  # it may only be somebody who looks whether anyone trains here: `other_run`
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def other_run(folder: Path) -> str:
    """Who is training in a run directory, or nothing."""
    if not (folder / _LOCK).is_file():
        return ""  # nobody has ever trained here
    with open(folder / _LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "starting"
    return ""


def record_start(folder: Path, config: Config, model_file: Path, facts: dict[str, Any]) -> None:
    """Writes config.toml and adds an entry to provenance.json: the command, the code, the versions, and `facts`.

    model_file: the module that defines the model, which may be the user's own and in no repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.toml", to_toml(config))
    path = folder / "provenance.json"
    try:
        starts = json.loads(path.read_text()) if path.exists() else []
    except ValueError:  # not ours to lose: somebody may have edited it
        path.rename(path.with_suffix(".json.unreadable"))
        starts = []
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "git": _git_state(),
            "model_source": model_file.read_text(encoding="utf-8"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
            "versions": {name: _version(name) for name in _PACKAGES},
            **facts,
        }
    )
    replace_file(path, json.dumps(starts, indent=2))


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
