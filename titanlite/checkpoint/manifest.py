"""The manifest of a checkpoint: its numbers, and size and checksum of each of its files. A checkpoint without one is none.

    {"format": 3, "step": 100, "samples": 800, ..., "files": {".metadata": {"bytes": 5310, "xxh3_128": "8f0e..."}, ...},
     "xxh3_128": the checksum of all of the above as it is written}

XXH3 (https://xxhash.com) finds damage, not malice: it reads 20 times as fast as SHA-256, so that checking costs no more than
reading. Against malice see storage.py. `xxhsum -H128` computes the same.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from titanlite.errors import UserError

FILE = "manifest.json"
_FORMAT = 3
_OWN = "xxh3_128"
_NUMBERS = {
    "step": int,
    "samples": int,
    "global_batch": int,
    "data": dict,
    "schedule": dict,
    "config": dict,
    "architecture": dict,
}
_CHUNK = 2**22


class Contents(NamedTuple):
    """What a file must hold."""

    bytes: int
    xxh3_128: str


class Manifest(NamedTuple):
    """The numbers of a run at a step, and the files with its tensors: path inside the folder -> contents."""

    numbers: dict[str, Any]
    files: dict[str, Contents]


class Damaged(UserError):
    """A checkpoint that is not what was written."""


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, on the disk when this returns."""
    files = {name: contents._asdict() for name, contents in sorted(manifest.files.items())}
    with open(folder / FILE, "w", encoding="utf-8") as file:
        file.write(_text({"format": _FORMAT, **manifest.numbers, "files": files}))
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Reads a manifest, and checks that it is byte for byte what was written.

    Raises Damaged where it is not, UserError where another version has written it.
    """
    path = folder / FILE
    try:
        text = path.read_bytes().decode()  # read_text would take other line ends for the same
        found = json.loads(text)
        own = found.pop(_OWN)
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(f"{path}: is damaged: it is not the JSON that was written") from None
    if _text(found) != text:
        raise Damaged(f"{path}: is damaged: its checksum is not {own}")
    if found.get("format") != _FORMAT:
        raise UserError(f"{path}: is of format {found.get('format')}; this version reads format {_FORMAT}")
    for name, kind in _NUMBERS.items():
        if not isinstance(found.get(name), kind):
            raise Damaged(f"{path}: is damaged: it has no {name}")
    try:
        files = {name: Contents(int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in found.pop("files").items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Damaged(f"{path}: is damaged: it has no list of files") from None
    if odd := [name for name in files if name in ("", ".", "..") or "/" in name or "\0" in name]:
        raise Damaged(f"{path}: is refused: {odd[0]!r} is no name of a file in a checkpoint")
    del found["format"]
    return Manifest(found, files)


def fault(folder: Path, name: str, contents: Contents) -> str:
    """What is wrong with a file of a checkpoint, or nothing."""
    path = folder / name
    try:
        if not path.exists():
            return f"{path}: is missing"
        if not path.is_file():
            return f"{path}: cannot be read: it is not a file"
        size = path.stat().st_size
        if size != contents.bytes:
            return f"{path}: is damaged: it has {size:,} bytes, and {contents.bytes:,} were written"
        found = checksum(path)
    except OSError as error:
        return f"{path}: cannot be read: {error}"
    return "" if found == contents.xxh3_128 else f"{path}: is damaged: its checksum is {found}, not {contents.xxh3_128}"


def checksum(path: Path) -> str:
    """The 128 bits of XXH3 of a file, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _text(found: dict[str, Any]) -> str:
    """The one way to write a manifest: with its own checksum as the last entry."""
    body = json.dumps(found, indent=1)
    return f'{body[:-2]},\n "{_OWN}": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'
