"""Hostile pickles as a checkpoint's metadata: each is refused, or read in time and memory proportional to its size."""

import pickle
import sys
from pathlib import Path

import pytest

from tests.limited import leave_memory, run_limited
from titanlite.checkpoint.manifest import Damaged
from titanlite.checkpoint.storage import METADATA, read_metadata

START = b"\x80\x04"
_MODULE = "torch.distributed.checkpoint.metadata"


def _text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def _class(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


SIZE, INDEX = _class("torch", "Size") + pickle.MEMOIZE, _class(_MODULE, "MetadataIndex") + pickle.MEMOIZE


def nested(levels: int) -> bytes:
    """A tuple of two references to a tuple of two references to ...; as the key of a table."""
    references = [pickle.BINGET + bytes([level]) for level in range(levels)]
    tuples = b"".join(reference * 2 + pickle.TUPLE2 + pickle.MEMOIZE for reference in references)
    return START + _text("a") + pickle.MEMOIZE + tuples + b"}h" + bytes([levels]) + b"Ns."


def copies(parts: int, references: int) -> bytes:
    """Repeated Sizes of a long tuple."""
    numbers = pickle.MARK + b"K\x01" * parts + pickle.TUPLE + pickle.MEMOIZE
    made = (b"h\x00" + b"h\x01" + pickle.TUPLE1 + pickle.REDUCE) * references
    return START + SIZE + numbers + pickle.MARK + made + pickle.TUPLE + b"."


def attributes(parts: int, references: int) -> bytes:
    """Objects that all copy the attributes of one long table."""
    names = b"".join(_text(f"{number:05d}") + b"N" for number in range(parts))
    table = b"}" + pickle.MEMOIZE + pickle.MARK + names + pickle.SETITEMS
    made = (b"h\x00)" + pickle.NEWOBJ + b"h\x01" + pickle.BUILD) * references
    return START + INDEX + table + pickle.MARK + made + pickle.TUPLE + b"."


BOMBS = {
    "tuples of two tuples": nested(200),
    "a tuple of a tuple of ...": START + b"}N" + pickle.TUPLE1 * 10**6 + b"Ns.",
    "copies of a long tuple": copies(250_000, 80_000),
    "copies of a long table": attributes(50_000, 50_000),
    "a place in the memo": START + b"N" + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f" + b".",
    "the top of the stack again": START + b"(N" + pickle.DUP * 10**6 + b"t.",
    "an integer of 2 MiB": START + pickle.LONG4 + (2**21).to_bytes(4, "little") + b"\x7f" * 2**21 + b".",
    "an integer of 4 million digits": START + pickle.LONG + b"9" * 2**22 + b"L\n.",
    "bytes that are not there": START + pickle.BINBYTES8 + (2**62).to_bytes(8, "little") + b".",
    "a list of a list of ...": START + b"]" * 10**5 + pickle.APPEND * (10**5 - 1) + b".",
    "keys of one hash": START + b"}(" + b"".join(
        b"\x8a\x08" + (n * sys.hash_info.modulus).to_bytes(8, "little") + b"N" for n in range(4)) * 10**4 + b"u.",
    "an object within an object of ...": START + INDEX + b"}" + (
        b"h\x00)" + pickle.NEWOBJ + b"}" + _text("fqn")) * 10**4 + b"N" + b"sb" * 10**4 + b"Ns.",
    "attributes of a class": START + INDEX + b"}" + _text("__hash__") + b"Ns" + pickle.BUILD + b".",
}  # fmt: skip


def read_all() -> None:
    """In a separate process, since a reader that hangs in C cannot be stopped otherwise."""
    leave_memory(2**30)
    for title, content in BOMBS.items():
        print(title, flush=True)
        Path(METADATA).write_bytes(content)
        with pytest.raises(Damaged, match="is refused: ") as raised:
            read_metadata(Path(), {})
        assert len(str(raised.value)) < 2000, title


def test_no_pickle_takes_more_time_or_memory_than_its_size_allows(tmp_path):
    assert run_limited(__name__, "read_all()", tmp_path).count("\n") == len(BOMBS)
