"""titanlite checkpoint list | verify | show DIR

DIR is a run directory, a folder of checkpoints, or one checkpoint, such as outputs/llama_debug/checkpoint/step-00000100.

    list     one line a checkpoint: step, size, when it was written, and what can be told without reading it
    verify   reads every file and compares it with the manifest
    show     of one checkpoint, by default the newest: its numbers, its configuration, and name, shape and type of every tensor
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.checkpoint.storage import read_metadata, tensor_entries
from titanlite.config.read import read_config
from titanlite.errors import UserError


def main() -> None:
    """Exit code 0, 1 where a checkpoint is damaged, 2 where there is none."""
    parser = argparse.ArgumentParser(prog="titanlite checkpoint", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=list(_ACTIONS))
    parser.add_argument("dir", type=Path)
    words = parser.parse_args()
    try:
        sys.exit(_ACTIONS[words.action](checkpoints(words.dir)))
    except manifest.Damaged as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that a folder is or holds, oldest first. Raises UserError where there is none."""
    if (folder / manifest.FILE).is_file() or folder.name in (step_folder(folder, s).name for s in list_steps(folder.parent)):
        return [folder]
    for inside in _folders_in(folder):
        if steps := list_steps(inside):
            return [step_folder(inside, step) for step in steps]
    raise UserError(f"{folder}: no checkpoint there, such as step-00000100" if folder.is_dir() else f"{folder}: no such folder")


def _folders_in(folder: Path) -> Iterator[Path]:
    """Where the checkpoints of a run directory, or of the folder itself, are."""
    yield folder
    stored = folder / "config.toml"
    if stored.is_file():
        yield folder / read_config(stored, []).checkpoint.folder


def list_them(sources: list[Path]) -> int:
    damaged = 0
    for source in sources:
        try:
            found = manifest.read(source)
        except UserError as error:
            damaged += 1
            print(f"{source}  damaged: {error}")
            continue
        size = sum(contents.bytes for contents in found.files.values())
        missing = [name for name, contents in found.files.items() if _size(source / name) != contents.bytes]
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((source / manifest.FILE).stat().st_mtime))
        state = f"damaged: {', '.join(missing)}" if missing else f"{len(found.files)} files, not read"
        damaged += bool(missing)
        print(f"{source}  {size / 2**30:9.3f} GiB  {found.numbers['samples']:>12,} samples  {written}  {state}")
    return int(damaged > 0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def verify(sources: list[Path]) -> int:
    damaged = 0
    for source in sources:
        try:
            found = manifest.read(source)
            faults = list(load.faults(source, found))
            if not faults:
                read_metadata(source, found.files)
        except UserError as error:
            faults = [str(error)]
        damaged += bool(faults)
        print("\n".join(faults) if faults else f"{source}: sound")
    return int(damaged > 0)


def show(sources: list[Path]) -> int:
    source = sources[-1]
    found = manifest.read(source)
    for name, value in _leaves(found.numbers):
        print(f"{name} = {value!r}")
    for name, entry in sorted(tensor_entries(read_metadata(source, found.files)).items()):
        print(f"{name}  {tuple(entry.size)}  {str(entry.properties.dtype).removeprefix('torch.')}")
    return 0


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


_ACTIONS = {"list": list_them, "verify": verify, "show": show}


if __name__ == "__main__":
    main()
