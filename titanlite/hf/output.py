"""New files and folders that commands write: they appear under their name complete or not at all."""

import shutil
from pathlib import Path

from titanlite.ground.errors import UserError
from titanlite.ground.files import unfinished_path, writing


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
