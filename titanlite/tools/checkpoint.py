"""titanlite checkpoint list | verify | show DIR

DIR is a run directory, a folder of checkpoints, or one checkpoint, such as outputs/llama_debug/checkpoint/step-00000100.

    list     one line for each checkpoint: its folder, size, samples, time, and whether files are missing or have a wrong size
    verify   reads every file and compares it with the manifest
    show     prints the numbers and configuration of the newest one, and the name, shape and dtype of every tensor
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.checkpoint.storage import read_metadata, tensor_entries
from titanlite.config.operation import Checkpoint
from titanlite.ground.errors import UserError
from titanlite.ground.run_files import CONFIG
from titanlite.ground.untrusted import Unread, read_toml, validated
from titanlite.launch.agreement import leaves
from titanlite.tools.options import command_parser, existing_folder


def main() -> None:
    """Exit code 0; 1: a checkpoint is damaged; 2: there is none, or the machine cannot read it."""
    parser = command_parser("checkpoint", __doc__)
    parser.add_argument("action", choices=[*LINES, "show"])
    parser.add_argument("dir", type=existing_folder)
    options = parser.parse_args()
    try:
        sources = checkpoints(options.dir)
        sys.exit(show(sources) if options.action == "show" else print_each(sources, LINES[options.action]))
    except manifest.Damaged as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that a folder is or holds, oldest first. Raises UserError where there is none."""
    if (folder / manifest.FILE).is_file() or folder.name in (step_folder(folder, s).name for s in list_steps(folder.parent)):
        return [folder]
    for inside in [folder, *_folder_of_run(folder / CONFIG)]:
        if steps := list_steps(inside):
            return [step_folder(inside, step) for step in steps]
    raise UserError(f"{folder}: no checkpoint there, such as step-00000100" if folder.is_dir() else f"{folder}: no such folder")


def _folder_of_run(config: Path) -> list[Path]:
    """The folder of checkpoints that the configuration of a run names; all else in it may be of an earlier version."""
    if not config.is_file():
        return []
    table = read_toml(config).get("checkpoint")
    named = {"folder": table["folder"]} if isinstance(table, dict) and "folder" in table else {}
    return [config.parent / validated(Checkpoint, named, str(config)).folder]


def add_weights(parser: argparse.ArgumentParser) -> None:
    """--weights, for commands that take the weights of a checkpoint."""
    parser.add_argument("--weights", choices=["model", "ema"], default="model", help="ema: their average (optimizer.ema_decay)")


def _listed(source: Path) -> str:
    stored = manifest.read(source)
    size = sum(contents.bytes for contents in stored.files.values())
    if missing := [name for name, contents in stored.files.items() if _size(source / name) != contents.bytes]:
        raise manifest.Damaged(f"{source}: is damaged: {', '.join(missing)}")
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((source / manifest.FILE).stat().st_mtime))
    numbers = f"{size / 2**30:9.3f} GiB  {stored.numbers['samples']:>12,} samples"
    return f"{source}  {numbers}  {written}  {len(stored.files)} files, not read"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _verified(source: Path) -> str:
    load.intact(source)
    return f"{source}: sound"


def print_each(sources: list[Path], line_of: Callable[[Path], str]) -> int:
    """Prints the line of each checkpoint, or its damage; -> the exit code."""
    code = 0
    for source in sources:
        try:
            line = line_of(source)
        except Unread:
            raise
        except UserError as error:
            if source.is_dir():
                code, line = 1, str(error)
            else:  # by the retention of a run that trains there
                line = f"{source}: has been deleted meanwhile"
        print(line)
    return code


def show(sources: list[Path]) -> int:
    source = sources[-1]
    stored = manifest.read(source)
    hashes = {module: entry["hash"] for module, entry in stored.numbers.get("model_source", {}).items()}  # without the texts
    for name, value in leaves(stored.numbers | {"model_source": hashes}):
        print(f"{name} = {value!r}")
    for name, entry in sorted(tensor_entries(read_metadata(source, stored.files)).items()):
        print(f"{name}  {tuple(entry.size)}  {str(entry.properties.dtype).removeprefix('torch.')}")
    return 0


LINES = {"list": _listed, "verify": _verified}
