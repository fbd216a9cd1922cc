"""Parquet files: damaged, forged, with wrong columns and types, and files that are not Parquet."""

import functools
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tests.hostile.judge import Case
from titanlite.data.prepare import documents
from titanlite.data.prepare.readers import Bad, Document, describe_location, read, where
from titanlite.ground.errors import UserError

_TEXTS = [f"text {number} " * (1 + number % 5) for number in range(40)]
_GROUP = 10  # rows
_FLIPS, _CUTS = 32, 6
_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_NAMES = r"a\.parquet"

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
    "empty": b"",
    "the mark alone": b"PAR1",
    "a footer of 4 GiB": b"PAR1" + bytes(64) + struct.pack("<I", 2**32 - 1) + b"PAR1",
    "an encrypted footer": b"PARE" + bytes(64) + struct.pack("<I", 64) + b"PARE",
    "JSON": b'{"text": "a"}\n',
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:8f0e\nsize 12345\n",
    "an Arrow file": b"ARROW1\0\0" + bytes(100) + b"ARROW1",
}


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(f"tables {seed}")
    for name, (columns, right) in _COLUMNS.items():
        yield _case(f"columns: {name}", functools.partial(_write, columns=columns), right)
    for name, content in _FOREIGN.items():
        yield _case(f"foreign: {name}", functools.partial(Path.write_bytes, data=content))
    for name, make in (("a FIFO", os.mkfifo), ("a link to nothing", _link("nowhere")), ("a device", _link("/dev/zero"))):
        yield _case(name, make)
    size = len(_sound())
    for number in range(_CUTS):
        cut = (number * size + draw.randrange(size)) // _CUTS
        yield _case(f"cut {number}", functools.partial(_write_changed, change=lambda content, cut=cut: content[:cut]))
    for number in range(_FLIPS):
        at, bit = (number * size + draw.randrange(size)) // _FLIPS, draw.randrange(8)
        change = functools.partial(_flip, at=at, bit=bit)
        yield _case(f"a flipped bit {number}", functools.partial(_write_changed, change=change), right=True, same=True)
    for count in (11, 2**31, 2**40, 2**62):
        yield _case(f"a row group of {count} rows", functools.partial(_write_rows, count=count))


@functools.cache
def _sound() -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": _TEXTS})
    # with a checksum for each page, and rows of about a page's size
    parquet.write_table(table, sink, row_group_size=_GROUP, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def _write(path: Path, columns: dict[str, Any]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def _write_changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(_sound()))


def _flip(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def _link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def _varint(number: int) -> bytes:
    """A number as in the footer: Thrift's compact protocol."""
    number, parts = 2 * number, []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def _write_rows(path: Path, count: int) -> None:
    """A footer whose row groups declare other numbers of rows; its fields are sequential, so nothing else moves."""
    content = _sound()
    length = struct.unpack("<I", content[-8:-4])[0]
    body, footer = content[: -8 - length], content[-8 - length : -8]
    forged = footer.replace(b"\x16" + _varint(_GROUP), b"\x16" + _varint(count))
    assert forged != footer
    path.write_bytes(body + forged + struct.pack("<I", len(forged)) + b"PAR1")


def _case(name: str, write: Callable[[Path], object], right: bool = False, same: bool = False) -> Case:
    """right: whether the file may be accepted; same: only with the texts of the valid file."""

    def make(folder: Path) -> Callable[[], object]:
        write(folder / "a.parquet")

        def action() -> None:
            found = _read()
            assert not same or found == _TEXTS, "other texts are read"

        return action

    return Case("tables", name, make, _NAMES, right)


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
