"""New files and folders that commands write: they appear under their name complete or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from titanlite.ground.errors import UserError


def unfinished_path(output: Path) -> Path:
    """Where a command writes before the output is complete."""
    return output.with_name(f".{output.name}.unfinished")


def start_output(output: Path) -> Path:
    """Makes `unfinished_path` free, which is returned. Raises UserError where the output exists, or cannot be written."""
    if output.exists():
        raise UserError(f"{output}: already exists; name another output, or remove it")
    unfinished = unfinished_path(output)
    with reporting(output):
        if unfinished.is_dir():
            shutil.rmtree(unfinished)  # left by a killed command
        output.parent.mkdir(parents=True, exist_ok=True)
    return unfinished


@contextlib.contextmanager
def reporting(output: Path) -> Iterator[None]:
    """Makes an error of the disk a UserError that names the output."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from None
