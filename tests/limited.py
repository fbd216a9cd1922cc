"""Limits memory, CPU time or disk space of a test."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_limited(module: str, call: str, folder: Path, seconds: int = 100) -> str:
    """Evaluates a call of a module's function in `folder`; -> its output.

    The kernel ends it after this many seconds of CPU time. Fails with its last lines unless it exits with 0.
    """
    code = f"import resource; resource.setrlimit(resource.RLIMIT_CPU, ({seconds},) * 2); import {module}; {module}.{call}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """A separate disk, with these options of tmpfs; skips the test if mounting is not allowed."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("nobody but root mounts a disk, and some containers do not let root either")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def leave_memory(size: int) -> None:
    """From now on this process can map only this many more bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, resource.RLIM_INFINITY))
