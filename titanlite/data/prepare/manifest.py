"""The manifest of a folder that `titanlite tokenize` has written: its schema and its checksum."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import Field

from titanlite.data.blocks import BLOCK
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import MIB, Absent, Count, FileName, FileSchema, Unread, read_json, validated

MANIFEST = "manifest.json"
SEAL = "xxh3_128"  # the entry with the checksum of all others
_LIMIT = 1024 * MIB  # with a million inputs: 100 MiB


class _Shard(FileSchema):
    name: FileName
    documents: Count
    tokens: Count
    bin: str
    lengths: str
    loss: str | None


class _Input(FileSchema):
    path: str
    bytes: Count | None
    documents: Count
    tokens: Count


class _Manifest(FileSchema):
    format: Literal[1]
    tokenizer: str
    largest_id: Annotated[int, Field(ge=-1, lt=2**31)]
    beginning_of_text: list[Count]
    documents: Count
    tokens: Count
    shards: Annotated[list[_Shard], Field(min_length=1)]
    inputs: list[_Input]
    fingerprint: str
    block_bytes: Annotated[int, Field(ge=BLOCK, le=BLOCK)]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of token files. Raises UserError."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path, FileSchema, _LIMIT)
        if manifest.get(SEAL) != _seal(manifest):
            raise UserError(f"{path}: wrong checksum")
        validated(_Manifest, manifest, str(path))
    except (Absent, Unread):
        raise
    except UserError as error:
        remedy = f"tokenize the text again. A folder of text with a {MANIFEST}: name the files, such as {folder}/*.jsonl"
        raise UserError(f"{error}: damaged, of titanlite 0.1, or of another program; {remedy}") from None
    return manifest


def _seal(values: dict[str, Any]) -> str:
    """The checksum of all entries of a manifest but SEAL."""
    text = json.dumps({name: value for name, value in values.items() if name != SEAL}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """A manifest with its checksum, and with the block size of the checksums of its files."""
    values = {**values, "block_bytes": BLOCK}
    return {**values, SEAL: _seal(values)}
