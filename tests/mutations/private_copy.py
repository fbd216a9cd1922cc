"""A private copy of the tree, with a fault planted while a command or some tests run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutations.faults import ROOT, Fault, with_fault
from tests.repetitions import IN_MAKE_TEST

_NOT_COPIED = (".git", ".venv", "__pycache__", "build", "outputs", "*.egg-info", ".*_cache")
# Seconds, on a busy machine: a fault makes some tests hang.
_TITANLITE, _TEST, _TEST_FILE = 1800, 900, 3600


class Answer(NamedTuple):
    """The result of a command on the copy."""

    code: int  # exit code; 124: timeout
    output: str
    seconds: float


def copy_tree(folder: Path) -> None:
    """Copies this checkout without what it has built, and with its environment, where run_train.sh finds its interpreter."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    if sys.prefix != sys.base_prefix:
        (folder / ".venv").symlink_to(sys.prefix)


class Copy:
    """The tree in a folder. Its commands do not share titanlite's cache with others."""

    def __init__(self, folder: Path):
        self.root = folder / "tree"
        self._cache, self._of_pytest = folder / "cache", folder / "pytest"
        self._clock = int(time.time()) - 10**6
        copy_tree(self.root)

    @contextlib.contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        path, changed = with_fault(self.root, fault)
        source = path.read_text(encoding="utf-8")
        self._write(path, changed)
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        """Each write gets a different time: Python trusts a compiled file if its source has the same time and size."""
        self._clock += 1
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self._clock, self._clock))

    def titanlite(self, words: Sequence[str]) -> Answer:
        return self._python(["titanlite", *words], _TITANLITE)

    def failing(self, targets: Sequence[str]) -> list[str]:
        """The first failing test of these files or tests; the targets themselves if pytest does not end, or cannot start."""
        shutil.rmtree(self._of_pytest, ignore_errors=True)
        options = ["-x", "-q", f"--timeout={_TEST}", "-m", IN_MAKE_TEST, "-o", f"cache_dir={self._of_pytest}"]
        answer = self._python(["pytest", *options, *targets], _TEST_FILE)
        failed = self._of_pytest / "v/cache/lastfailed"
        if answer.code:
            print(answer.output[-1500:], file=sys.stderr)
            return list(json.loads(failed.read_text())) if failed.exists() else list(targets)
        return []

    def _python(self, words: Sequence[str], seconds: float) -> Answer:
        """Runs a module in its own process group, which ends with it."""
        begun = time.monotonic()
        shutil.rmtree(self._cache, ignore_errors=True)
        own = {"PYTHONPATH": str(self.root), "TITANLITE_CACHE": str(self._cache), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.root,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code, output = 124, f"{words[0]} did not end within {seconds:.0f} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Answer(code, output, time.monotonic() - begun)
