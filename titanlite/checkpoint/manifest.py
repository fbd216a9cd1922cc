"""The manifest of a checkpoint: the numbers of the run, and size and checksum of each file. Every checkpoint has one.

    {"format": 3, "step": 100, "samples": 800, ..., "files": {".metadata": {"bytes": 5310, "xxh3_128": "8f0e..."}, ...},
     "xxh3_128": the checksum of all the text above}

XXH3 (https://xxhash.com) detects damage, not manipulation. It is 20 times as fast as SHA-256, so that verifying takes as long
as reading. storage.py guards against manipulation. `xxhsum -H128` computes the same checksums.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import xxhash
from pydantic import Field

from titanlite.ground import untrusted
from titanlite.ground.errors import UserError
from titanlite.ground.files import publish, replace_file
from titanlite.ground.run_files import DataSchema, SourceSchema
from titanlite.ground.untrusted import MIB, Count, FileName, Positive, Unread

FILE = "manifest.json"
_FORMAT = 3
_OWN = "xxh3_128"
_CHUNK = 2**22
_LIMIT = 256 * MIB  # 1 MiB on 10,000 ranks; 80 MiB with an own stream's state of 32, since each number has a line


class _Data(untrusted.FileSchema):
    sources: list[SourceSchema] = Field(default=[])  # imported weights have none


class _Module(untrusted.FileSchema):
    hash: str
    text: str


class FileDigest(NamedTuple):
    """Size and checksum of a file."""

    bytes: Count
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _ManifestSchema(untrusted.FileSchema):
    """What a manifest must hold."""

    step: Count
    samples: Count
    global_batch: Count
    data: _Data
    config: dict[str, dict[str, Any]]
    architecture: dict[str, Any]
    model_source: dict[str, _Module] = Field(default={})  # imported weights have none
    own_source: dict[str, _Module] = Field(default={})  # earlier versions have none
    stream: list[Any] = Field(default=[])  # the state of each data rank's own stream
    run: str = ""  # imported weights, and runs of titanlite 0.2, have none
    files: dict[FileName, FileDigest]


class _Schedule(untrusted.FileSchema):
    total_steps: Positive  # all else is in the configuration


class _Checkpoint(untrusted.FileSchema):
    exclude_from_loading: list[str] = Field(default=[])


class _Sections(untrusted.FileSchema):
    checkpoint: _Checkpoint
    training: dict[str, Any]


class _Run(untrusted.FileSchema):
    """What the manifest of a run must hold too, beside its timeline; that of imported weights does not."""

    samples: Count
    global_batch: Positive
    data: DataSchema
    schedule: _Schedule
    config: _Sections
    model_source: dict[str, _Module]
    loss_sum: float
    loss_count: Count


class Manifest(NamedTuple):
    """The numbers of a run at a step, and the files with its tensors: name in the folder -> contents."""

    numbers: dict[str, Any]
    files: dict[str, FileDigest]


class Damaged(UserError):
    """A checkpoint differs from what was written."""


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Around reading a file of a checkpoint: raises Damaged for a fault of the file, or Unread."""
    try:
        with untrusted.reading(path):
            yield
    except (Unread, Damaged):
        raise
    except UserError as error:
        raise Damaged(str(error)) from None


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, and syncs it to the disk."""
    files = {name: contents._asdict() for name, contents in sorted(manifest.files.items())}
    replace_file(folder / FILE, _text({"format": _FORMAT, **manifest.numbers, "files": files}))


def commit(unfinished: Path, final: Path, manifest: Manifest) -> None:
    """Makes a written folder a checkpoint: adds the manifest, and then gives the folder its final name.

    Raises UserError where `read` would refuse the manifest, which holds values of the user's own code too.
    """
    write(unfinished, manifest)
    read(unfinished)
    publish(unfinished, final)


def read(folder: Path) -> Manifest:
    """Reads a manifest and verifies that it is byte for byte as written.

    Raises Damaged if it is not, Unread, or UserError if another version of titanlite wrote it.
    """
    path = folder / FILE
    with damage(path):
        content = untrusted.read_bytes(path, _LIMIT)
        try:
            text = content.decode()  # what is not UTF-8 is damage too
            values = untrusted.parse_json(text)
        except ValueError as error:
            raise Damaged(f"{path}: is damaged: {error}") from None
        own = values.pop(_OWN, None) if isinstance(values, dict) else None
        if own is None or _text(values) != text:
            raise Damaged(f"{path}: is damaged: its checksum is not {own}")
    if values.get("format") != _FORMAT:
        raise UserError(f"{path}: is of format {values.get('format')}; this version reads format {_FORMAT}")
    with damage(path):
        files = untrusted.validated(_ManifestSchema, values, f"{path}: is damaged").files
    return Manifest({name: value for name, value in values.items() if name not in ("format", "files")}, files)


def check_run(folder: Path, manifest: Manifest) -> None:
    """Raises UserError for a sound manifest without the state of a run that this version can continue."""
    weights = "begin from them with checkpoint.initial_load_path and checkpoint.initial_load_model_only = true"
    if manifest.numbers.get("imported"):
        raise UserError(f"{folder}: holds weights alone, without optimizer state, step or data position; {weights}")
    if not {"timeline", "mixture"} & manifest.numbers.keys():  # titanlite 0.2 wrote mixture
        remedy = f"{weights}, or continue the run with titanlite 0.2 and resume from what 0.2 has saved"
        raise UserError(f"{folder}: titanlite 0.1 wrote it, and only its weights can be used; {remedy}")
    untrusted.validated(_Run, manifest.numbers, f"{folder}: its manifest is sound, but does not describe a run of titanlite")


def fault(folder: Path, name: str, contents: FileDigest) -> str:
    """The damage of a checkpoint's file, or "". Raises Unread."""
    path = folder / name
    try:
        with damage(path):
            size = untrusted.size_of(path)
            if size != contents.bytes:
                return f"{path}: is damaged: it has {size:,} bytes, and {contents.bytes:,} were written"
            found = checksum(path)
    except Damaged as error:
        return str(error)
    return "" if found == contents.xxh3_128 else f"{path}: is damaged: its checksum is {found}, not {contents.xxh3_128}"


def checksum(path: Path) -> str:
    """The 128-bit XXH3 checksum of a file as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with untrusted.open_file(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _text(values: dict[str, Any]) -> str:
    """The text of a manifest, with its own checksum as the last entry. The text is unique, so `read` can compare it."""
    body = json.dumps(values, indent=1)
    return f'{body[:-2]},\n "{_OWN}": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'
