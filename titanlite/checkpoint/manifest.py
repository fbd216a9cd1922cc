"""The manifest of a checkpoint: the numbers of the run, and size and checksum of each file. No checkpoint is without one.

    {"format": 3, "step": 100, "samples": 800, ..., "files": {".metadata": {"bytes": 5310, "xxh3_128": "8f0e..."}, ...},
     "xxh3_128": the checksum of all the text above}

XXH3 (https://xxhash.com) detects damage, not manipulation. It is 20 times as fast as SHA-256, so that verifying takes as long
as reading. storage.py guards against manipulation. `xxhsum -H128` computes the same checksums.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from titanlite.errors import UserError
from titanlite.files import publish, replace_file

FILE = "manifest.json"
_FORMAT = 3
_OWN = "xxh3_128"
_CHUNK = 2**22

_Whole = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    """Entries that a later version adds are kept, and those of this version have the types with which it writes them."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Source(_Part):
    name: str
    documents: _Whole
    tokens: _Whole
    fingerprint: str
    share: Annotated[float, Field(gt=0.0, le=1.0)]


class _Data(_Part):
    sources: list[_Source] = []  # imported weights have none


class _Reached(_Part):
    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    order: _Whole
    drawn: _Whole
    replaced: _Whole


class _Mixture(_Part):
    position: _Whole
    sources: list[_Reached]


class _Module(_Part):
    hash: str
    text: str


class _Numbers(_Part):
    """What `Manifest.numbers` must hold. Manifests of titanlite 0.1 and of imported weights lack the optional ones."""

    step: _Whole
    samples: _Whole
    global_batch: _Whole
    data: _Data
    schedule: dict[str, Any]
    config: dict[str, Any]
    architecture: dict[str, Any]
    mixture: _Mixture | None = None
    model_source: dict[str, _Module] | None = None
    loss_sum: float = 0.0
    loss_count: _Whole = 0

    @model_validator(mode="after")
    def mixture_is_of_the_data(self) -> "_Numbers":
        if self.mixture is not None:
            if self.mixture.position > self.samples:
                raise ValueError(f"mixture.position is {self.mixture.position:,}, after samples = {self.samples:,}")
            read = [source.fingerprint for source in self.data.sources]
            if [source.fingerprint for source in self.mixture.sources[: len(read)]] != read:
                raise ValueError("mixture.sources are not those of data.sources")
        return self


class Contents(NamedTuple):
    """Size and checksum of a file."""

    bytes: int
    xxh3_128: str


class Manifest(NamedTuple):
    """The numbers of a run at a step, and the files with its tensors: name in the folder -> contents."""

    numbers: dict[str, Any]
    files: dict[str, Contents]


class Damaged(UserError):
    """A checkpoint differs from what was written."""


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, and syncs it to the disk."""
    files = {name: contents._asdict() for name, contents in sorted(manifest.files.items())}
    replace_file(folder / FILE, _text({"format": _FORMAT, **manifest.numbers, "files": files}))


def commit(unfinished: Path, final: Path, manifest: Manifest) -> None:
    """Makes a written folder a checkpoint: adds the manifest, and then gives the folder its final name."""
    write(unfinished, manifest)
    publish(unfinished, final)


def read(folder: Path) -> Manifest:
    """Reads a manifest and verifies that it is byte for byte as written.

    Raises Damaged if it is not, or UserError if another version of titanlite wrote it.
    """
    path = folder / FILE
    try:
        text = path.read_bytes().decode()  # read_text would convert line ends
        values = json.loads(text)
        own = values.pop(_OWN)
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(f"{path}: is damaged: it is not the JSON that was written") from None
    if _text(values) != text:
        raise Damaged(f"{path}: is damaged: its checksum is not {own}")
    if values.get("format") != _FORMAT:
        raise UserError(f"{path}: is of format {values.get('format')}; this version reads format {_FORMAT}")
    if missing := [name for name, field in _Numbers.model_fields.items() if field.is_required() and name not in values]:
        raise Damaged(f"{path}: is damaged: it has no {', '.join(missing)}")
    try:
        _Numbers.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its numbers"
        raise Damaged(f"{path}: is damaged: {place}: {first['msg']}") from None
    try:
        files = {name: Contents(int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in values.pop("files").items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Damaged(f"{path}: is damaged: it has no list of files") from None
    if odd := [name for name in files if name in ("", ".", "..") or "/" in name or "\0" in name]:
        raise Damaged(f"{path}: is refused: {odd[0]!r} is not a valid file name in a checkpoint")
    del values["format"]
    return Manifest(values, files)


def fault(folder: Path, name: str, contents: Contents) -> str:
    """The damage of a checkpoint's file, or ""."""
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
    """The 128-bit XXH3 checksum of a file as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _text(values: dict[str, Any]) -> str:
    """The text of a manifest, with its own checksum as the last entry. The text is unique, so `read` can compare it."""
    body = json.dumps(values, indent=1)
    return f'{body[:-2]},\n "{_OWN}": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'
