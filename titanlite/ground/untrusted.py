"""Every file that another program or machine may have written is read here, and validated before anything uses it.

A file must be a regular file once links are followed: a FIFO would block, a device has no end. It has a largest size, and is
UTF-8 text in JSON or TOML of bounded depth, with integers of bounded length. A pydantic model says what it must hold. Each
fault is one sentence that names the file, the location in it, the value and what is allowed.

Each limit is at least ten times the largest real file of its kind. `Unread` means that the machine cannot read a file now, for
lack of memory or by an error of the disk; the file itself may be intact.
"""

import contextlib
import errno
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from titanlite.ground import errors
from titanlite.ground.errors import UserError, sentence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 2**20
_DEPTH = 100  # tables and lists within each other; a tokenizer.json has 9
_DIGITS = 40  # of an integer; Python itself refuses more than 4,300, without a name
_TOO_DEEP, _TOO_LONG = f"more than {_DEPTH} lists and tables within each other", f"an integer of more than {_DIGITS} digits"
_TOML = MIB // 4  # a recipe has 2 KiB; the parser needs seconds for a hostile file of this size
# A text or a comment of TOML, as the parser ends them; one without an end goes on to the end of the line or file.
_QUOTED = re.compile(
    "|".join(
        [r'"""(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)', r"'''.*?(?:'{3,5}|\Z)", r'"(?:\\.|[^"\\\n])*"?', r"'[^'\n]*'?", r"#[^\n]*"]
    ),
    re.DOTALL,
)
_LINE = 16 * MIB  # a line of .jsonl has a few hundred bytes
_NAMED = 3  # faults of a file

Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(gt=0, lt=2**53)]
Pair = Annotated[tuple[Count, Count], Strict(False)]  # a list of two
Number = Annotated[float, Field(allow_inf_nan=False)]


def _in_its_folder(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name


FileName = Annotated[str, AfterValidator(_in_its_folder)]  # a file beside the one that names it


class FileSchema(BaseModel):
    """What a table of a file must hold. Entries that are not in the model are kept: a later version may write them."""

    model_config = ConfigDict(strict=True, extra="allow")


class Absent(UserError):
    """There is no such file."""


class Unread(UserError):
    """The machine cannot read a file now; the file may be sound."""


_OF_THE_FILE = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)  # a path that leads to no file; a socket


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Around all that reads a file: raises Absent where there is none, Unread for another error of the machine."""
    try:
        yield
    except FileNotFoundError:
        raise Absent(f"{path}: is missing") from None
    except MemoryError:
        raise Unread(f"{path}: cannot be read: this machine has too little memory") from None
    except OSError as error:
        kind = UserError if error.errno in _OF_THE_FILE else Unread
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from None


# ------------------------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def open_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading; ends as `reading`. Raises Absent, Unread, or UserError for anything else."""
    errors.last_file = str(path)
    with reading(path):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it, opening a FIFO waits for its writer
        except ValueError as error:  # a name with a zero byte
            raise UserError(f"{path}: cannot be read: {error}") from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UserError(f"{path}: cannot be read: must be a regular file, not a folder, a FIFO, a socket or a device")
        with io.BufferedReader(io.FileIO(handle)) as file:
            yield file


def size_of(path: str | Path) -> int:
    """The bytes of a regular file that can be read. Raises as `open_file`."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: str | Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= limit else b""
        while size < len(content) <= limit and (more := file.read(MIB)):  # it grows, or is of /proc, where sizes are 0
            content += more
        size = max(size, len(content))
    if size > limit:
        raise UserError(f"{path}: has {size:,} bytes, and at most {limit:,} are read")
    return content


def read_text(path: str | Path, limit: int) -> str:
    """A whole file as UTF-8 text; line ends are kept."""
    with reading(path):
        return _decoded(read_bytes(path, limit), str(path))


def _decoded(content: bytes, location: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: cannot be read: not UTF-8 text: byte {error.start:,}: {error.reason}") from None


# ------------------------------------------------------------------------------------------------------------ JSON and TOML


def read_json(path: str | Path, model: Any, limit: int) -> Any:
    """The value of a JSON file that fits a pydantic model, as `json` makes it."""
    with reading(path):
        return _valid_json(read_text(path, limit), model, str(path))


def read_lines(path: str | Path, model: Any) -> Iterator[Any]:
    """The values of a .jsonl file, without an incomplete last line, which a killed run leaves."""
    with open_file(path) as file:
        number = 0
        while (line := file.readline(_LINE + 1)).endswith(b"\n"):
            number += 1
            yield _valid_json(_decoded(line, location := f"{path}: line {number}"), model, location)
    if len(line) > _LINE:
        raise UserError(f"{path}: line {number + 1}: has more than {_LINE:,} bytes")
    if line.strip(b"\0") and not line.startswith(b"{"):  # after a power failure, zeros may stand for the last line
        raise UserError(f"{path}: line {number + 1}: begins with {line[:20]!r}, must be an object of JSON")


def _valid_json(text: str, model: Any, location: str) -> Any:
    try:
        values = parse_json(text, _each_once)
    except ValueError as error:
        raise UserError(f"{location}: cannot be read: {error}") from None
    validated(model, values, location)
    return values


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    with reading(path):
        text = read_text(path, _TOML).removeprefix("\ufeff")
        try:
            return parse_toml(text)
        except ValueError as error:
            raise UserError(f"{path}: cannot be read as TOML: {error}") from None


def parse_json(text: str, pairs: Any = None) -> Any:
    """The value of a JSON text. pairs: as json's object_pairs_hook. Raises ValueError with the reason why there is none."""
    try:
        return bounded(json.loads(text, object_pairs_hook=pairs))
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, character {error.colno}" if error.lineno > 1 else f"character {error.pos + 1}"
        raise ValueError(f"not JSON: {error.msg} at {line}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(_too_much(error)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError with the reason why there are none."""
    # the parser needs time in the square of the names in a key
    if any(part.count(".") > _DEPTH for part in re.split("[\n=,]", _QUOTED.sub("", text))):
        raise ValueError(f"a key of more than {_DEPTH} names")
    try:
        return bounded(tomllib.loads(text))
    except (RecursionError, ValueError) as error:
        raise ValueError(_too_much(error)) from None


def _too_much(error: Exception) -> str:
    """The text of a parser's error, or what it found too much of."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    return _TOO_LONG if "int_max_str_digits" in str(error) else str(error)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{json.dumps(twice)} is given twice")
    return table


def bounded(value: Any) -> Any:
    """A value whose depth and integers are bounded, level by level: code that recurses cannot overflow the stack."""
    level, depth = [value], 0
    while level:
        if depth > _DEPTH:
            raise ValueError(_TOO_DEEP)
        if any(type(each) is int and abs(each) >= 10**_DIGITS for each in level):
            raise ValueError(_TOO_LONG)
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level, depth = [each for values in inner for each in values], depth + 1
    return value


# -------------------------------------------------------------------------------------------------------------- validation


def validated(model: Any, values: Any, location: str) -> Any:
    """The values as a pydantic model, or as a type that pydantic knows. Raises UserError with a line for each of the first
    faults. location: the file, or the file and a location in it."""
    try:
        return TypeAdapter(model).validate_python(values)
    except ValidationError as error:
        faults = [sentence([entry], ".".join(map(str, entry["loc"]))) for entry in error.errors()[:_NAMED]]
        raise UserError("\n".join(f"{location}: {fault}" for fault in faults)) from None
