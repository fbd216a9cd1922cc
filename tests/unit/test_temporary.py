"""A start leaves nothing in the temporary folder, and removes what killed ones have left."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

START = """
import os, signal, tempfile
from titanlite.launch.temporary import open_folder
folder = open_folder()
assert str(folder) == os.environ["TMPDIR"] == tempfile.gettempdir(), folder
tempfile.mkdtemp(prefix="torchelastic_")
print(folder, flush=True)
input()
"""


def start(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", START], env={**os.environ, "TMPDIR": str(parent)}, stdin=-1, stdout=-1, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def parent() -> Iterator[Path]:
    """With a shorter path than pytest's, as multiprocessing's sockets need it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_the_folder_of_a_killed_start_is_removed_by_the_next_one_and_that_of_a_running_one_is_not(parent):
    others = {parent / "tl-file", parent / "else"}
    (parent / "tl-file").touch()
    (parent / "else").mkdir()
    killed, running = start(parent), start(parent)
    assert {killed[1], running[1]} | others == set(parent.iterdir())
    killed[0].kill()
    killed[0].wait()
    last = start(parent)
    assert {running[1], last[1]} | others == set(parent.iterdir())
    assert [entry.name.startswith("torchelastic_") for entry in running[1].iterdir()] == [True]
    for process, _ in (running, last):
        process.communicate("\n")
