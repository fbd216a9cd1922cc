"""Parquet files: damaged, forged, with wrong columns and types, and files that are not Parquet."""

import functools
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tests.hostile.files import any_file, case, flip, sound, write
from tests.hostile.judge import Case
from tests.untrusted_files import Kind
from titanlite.data.prepare import documents
from titanlite.data.prepare.readers import Bad, Document, describe_location, read, where
from titanlite.ground.errors import UserError

_TEXTS = [f"text {number} " * (1 + number % 5) for number in range(40)]
_GROUP = 10  # rows
_FLIPS = 32
_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

# Columns, and whether all rows are documents.
_COLUMNS: dict[str, tuple[dict[str, Any], bool]] = {
    "texts": ({"text": _TEXTS}, True),
    "a dictionary of texts": ({"text": pyarrow.array(_TEXTS).dictionary_encode()}, True),
    "chats": ({"messages": [_CHAT] * 3}, True),
    "numbers": ({"text": [1, 2, 3]}, False),
    "bytes": ({"text": [b"a", b"\xff\xfe"]}, False),
    "nulls": ({"text": [None, None]}, False),
    "a null among texts": ({"text": ["a", None]}, False),
    "lists": ({"text": [["a", "b"], []]}, False),
    "structures": ({"text": [{"text": "a"}, {"text": "b"}]}, False),
    "times": ({"text": pyarrow.array([2**62, 0], pyarrow.timestamp("us"))}, False),
    "another name": ({"content": _TEXTS}, False),
    "a name inside of another": ({"data": [{"text": "a"}]}, False),
    "no columns": ({}, False),
    "bytes that are no text": ({"text": pyarrow.array([b"a", b"\xff\xfe"]).view(pyarrow.string())}, False),
}
_FOREIGN = {
    "the mark alone": b"PAR1",
    "a footer of 4 GiB": b"PAR1" + bytes(64) + struct.pack("<I", 2**32 - 1) + b"PAR1",
    "an encrypted footer": b"PARE" + bytes(64) + struct.pack("<I", 64) + b"PARE",
    "an Arrow file": b"ARROW1\0\0" + bytes(100) + b"ARROW1",
}


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(f"tables {seed}")
    yield from any_file(PARQUET, draw)
    for name, (columns, right) in _COLUMNS.items():
        yield case(PARQUET, f"columns: {name}", functools.partial(_write_columns, columns=columns), right)
    for name, content in _FOREIGN.items():
        yield case(PARQUET, f"also foreign: {name}", functools.partial(write, content=content))
    size = len(sound(PARQUET)[1])
    for number in range(_FLIPS):
        change = functools.partial(flip, at=(number * size + draw.randrange(size)) // _FLIPS, bit=draw.randrange(8))
        yield case(PARQUET, f"a bit of a page or of the footer {number}", change, right=True, same=True)
    for count in (11, 2**31, 2**40, 2**62):
        yield case(PARQUET, f"a row group of {count} rows", functools.partial(_write_rows, count=count))


def _write_sound(folder: Path) -> None:
    # with a checksum for each page, and rows of about a page's size
    table = pyarrow.table({"text": _TEXTS})
    parquet.write_table(table, folder / "a.parquet", row_group_size=_GROUP, write_page_checksum=True)


def _write_columns(path: Path, columns: dict[str, Any]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def _varint(number: int) -> bytes:
    """A number as in the footer: Thrift's compact protocol."""
    number, parts = 2 * number, []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def _write_rows(path: Path, count: int) -> None:
    """A footer whose row groups declare other numbers of rows; its fields are sequential, so nothing else moves."""
    content = path.read_bytes()
    length = struct.unpack("<I", content[-8:-4])[0]
    body, footer = content[: -8 - length], content[-8 - length : -8]
    forged = footer.replace(b"\x16" + _varint(_GROUP), b"\x16" + _varint(count))
    assert forged != footer
    path.write_bytes(body + forged + struct.pack("<I", len(forged)) + b"PAR1")


def _read() -> list[Any]:
    """The documents, as `titanlite tokenize` reads them."""
    found = []
    for part in (part for entry in documents.list_inputs(["a.parquet"]) for part in entry.parts):
        for entry in read(part, "text"):
            if isinstance(entry, Bad):
                raise UserError(f"{describe_location(*where(part, entry.location))}: {entry.reason}")
            assert isinstance(entry, Document)
            found.append(entry.content)
    return found


PARQUET = Kind("Parquet", "a.parquet", _write_sound, _read, json=False, text=False)
