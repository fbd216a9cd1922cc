"""Reads the documents of every kind of input, in order; an entry that is not a document is reported with its place.

Parquet, saved datasets, the hub and URLs are read by pyarrow, datasets and fsspec. Lines of JSON are read here: pyarrow.json
rejects a whole file for one bad line, whose number it counts from the start of a block; datasets first copies the text to its
cache. Neither reads a byte range of a file, which is how several workers share one.
"""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from titanlite.data.tokenizer import digest
from titanlite.errors import UserError

HUB = "hub:"
_MESSAGES = "messages"  # the key of a chat, an alternative to a text under the default key
_ROWS_AT_ONCE = 128  # a row may be a book
_BYTES_AT_ONCE = 2**20
_BOM = b"\xef\xbb\xbf"  # some Windows programs write it at the start of a UTF-8 file; it is not text


class Part(NamedTuple):
    """A range of an input that is read independently."""

    path: str  # a file, a URL, a folder that a dataset was saved to, or hub:NAME
    kind: str  # of READERS
    begin: int  # .jsonl: a byte; .parquet: a row group; dataset: a row; hub: a shard of the stream; else 0
    end: int  # exclusive
    size: int  # approximate bytes


class Document(NamedTuple):
    """A text, or the messages of a chat."""

    place: int | None  # as `where` takes it
    content: str | list[Any]


class Bad(NamedTuple):
    """An entry that is not a document."""

    place: int | None
    reason: str


class BadDocument(UserError):
    """An input holds an entry that is not a document, and --on-error is "fail"."""


def read(part: Part, text_key: str) -> Iterator[Document | Bad]:
    """The documents of a part, in order. Raises UserError for an input that cannot be read; bad entries are yielded as `Bad`.

    text_key: the key or column of the text. With "text", an entry without a text may have a chat under "messages".
    """
    try:
        yield from READERS[part.kind](part, text_key)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{part.path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:
        if part.kind not in ("hub", "dataset") and not is_url(part.path):
            raise
        # each file system raises its own classes for a lost connection
        raise UserError(f"{part.path}: cannot be read: {type(error).__name__}: {error}") from None


def where(part: Part, place: int | None) -> tuple[str, int | None]:
    """(file, line or row) of an entry that `read` yielded. Lines count from 1; rows from 0, as in `dataset[row]`.

    Reads the file up to the part to count its lines, so it is called for bad entries only.
    """
    if part.kind == "hub":
        return f"{part.path}, shard {part.begin}", place
    if part.kind == "jsonl" and part.begin and place is not None:
        with open_bytes(part.path) as file:
            left, lines = part.begin - 1, 1
            while left and (block := file.read(min(left, _BYTES_AT_ONCE))):
                lines += block.count(b"\n")
                left -= len(block)
        return part.path, lines + place
    return part.path, place


def describe_place(file: str, place: int | None) -> str:
    """The result of `where` in words."""
    word = "line" if kind_of(file) in ("jsonl", "gzip", "zstd") else "row"
    return file if place is None else f"{file}, {word} {place}"


def kind_of(path: str) -> str:
    """The reader of a file or URL, by its suffix: a key of READERS."""
    path = path.lower() if not is_url(path) else path.lower().partition("?")[0]  # a signature or a version follows
    return next((kind for suffix, kind in SUFFIXES.items() if path.endswith(suffix)), "text")


def is_url(path: str) -> bool:
    return "://" in path


def open_bytes(path: str) -> BinaryIO:
    """Opens a file or URL for reading. Raises OSError, for a URL also UserError."""
    if not is_url(path):
        return open(path, "rb")
    fsspec = need("fsspec", "a URL")
    try:
        # without this buffer, fsspec finds line ends in Python
        return io.BufferedReader(fsspec.open(path, "rb").open(), _BYTES_AT_ONCE)
    except Exception as error:
        raise UserError(f"{path}: cannot be opened: {type(error).__name__}: {error}") from None


def need(module: str, what: str) -> Any:
    """Imports an optional package. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs {package}: pip install 'titanlite[data]'") from None


def open_hub(path: str) -> tuple[Any, str]:
    """The stream of hub:NAME[:CONFIG][:SPLIT], a datasets.IterableDataset, and a digest of its version.

    Raises UserError where it cannot be opened.
    """
    datasets = need("datasets", path)
    name, config, split = (*path.removeprefix(HUB).split(":", 2), "", "")[:3]
    datasets.disable_progress_bars()  # each worker would draw one
    try:
        builder = datasets.load_dataset_builder(name, config or None)
        stream = builder.as_streaming_dataset(split=split or "train")
    except Exception as error:
        raise UserError(f"{path}: cannot be opened: {type(error).__name__}: {error}") from None
    files = (builder.config.data_files or {}).get(split or "train")
    # commits of a dataset on the hub, modification times in a folder
    versions = repr([builder.hash, getattr(files, "origin_metadata", None)])
    return stream, digest(versions)


def open_dataset(folder: str) -> Any:
    """The datasets.Dataset that `save_to_disk` wrote. Raises UserError where it cannot be opened."""
    datasets = need("datasets", f"{folder}, a saved dataset,")
    try:
        return datasets.load_from_disk(folder)
    except Exception as error:
        raise UserError(f"{folder}: cannot be opened: {type(error).__name__}: {error}") from None


# ------------------------------------------------------------------------------------------------------ text and lines


def _text(part: Part, _text_key: str) -> Iterator[Document | Bad]:
    with open_bytes(part.path) as file:
        content = file.read()
    try:
        yield Document(None, content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Bad(None, f"not UTF-8 text: line {line}, byte {error.start}: {error.reason}")


def _jsonl(part: Part, text_key: str) -> Iterator[Document | Bad]:
    """The entries of the lines whose first byte is in the part."""
    with open_bytes(part.path) as file:
        at = part.begin
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that the previous part reads
        yield from _entries(_lines_until(file, at, part.end), text_key)


def _lines_until(file: Iterable[bytes], at: int, end: int) -> Iterator[bytes]:
    if at < end:
        for line in file:
            yield line
            at += len(line)
            if at >= end:
                return


def _gzip(part: Part, text_key: str) -> Iterator[Document | Bad]:
    with open_bytes(part.path) as file:
        yield from _compressed(gzip.GzipFile(fileobj=file), text_key)


def _zstd(part: Part, text_key: str) -> Iterator[Document | Bad]:
    with open_bytes(part.path) as file:
        yield from _compressed(io.BufferedReader(_ZstdFile(file), _BYTES_AT_ONCE), text_key)


def _compressed(file: Iterable[bytes], text_key: str) -> Iterator[Document | Bad]:
    damage: list[Bad] = []

    def readable_lines() -> Iterator[bytes]:
        number = 0
        try:
            for number, line in enumerate(file, 1):  # noqa: B007, used below
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            damage.append(Bad(number + 1, f"the compressed file is damaged or truncated here: {error}"))

    yield from _entries(readable_lines(), text_key)
    yield from damage


class _ZstdFile(io.RawIOBase):
    """A decompressed .zst file. The package's own reader accepts a truncated file as complete; pyarrow's rejects --long=31."""

    def __init__(self, file: BinaryIO):
        self._blocks, self._ready = _decompressed(file), b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = block
        count = min(len(target), len(self._ready))
        target[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """The contents of a .zst file in blocks. Raises EOFError where it is truncated or damaged, as gzip does."""
    zstandard = need("zstandard", ".zst")
    frame = None
    while block := file.read(_BYTES_AT_ONCE // 8):
        while block:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            block = frame.unused_data  # the beginning of the next frame
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends inside a frame")


def _entries(lines: Iterable[bytes], text_key: str) -> Iterator[Document | Bad]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.removeprefix(_BOM).decode("utf-8"))
        except json.JSONDecodeError as error:
            yield Bad(number, f"not JSON: {error.msg} at character {error.pos + 1} of the line")
        except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, or too deep nesting
            yield Bad(number, f"not JSON that can be read: {error}")
        else:
            document = _document(number, entry, text_key)
            # only such an escape can spell half a surrogate pair, which no tokenizer can encode
            escaped = b"\\ud" in line or b"\\uD" in line
            yield _without_surrogates(document) if escaped and isinstance(document, Document) else document


def _without_surrogates(document: Document) -> Document | Bad:
    try:
        json.dumps(document.content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return Bad(document.place, "not Unicode text: half of a surrogate pair (\\ud800 to \\udfff)")
    return document


def _document(place: int, entry: Any, text_key: str) -> Document | Bad:
    if not isinstance(entry, dict):
        return Bad(place, f"must be an object with a {_expected(text_key)}, is {_type_name(entry)}")
    text = entry.get(text_key)
    if isinstance(text, str):
        return Document(place, text)
    if text is None and text_key == "text" and isinstance(entry.get(_MESSAGES), list):
        return Document(place, entry[_MESSAGES])
    given = [f'"{key}" is {_type_name(entry[key])}' for key in (text_key, _MESSAGES) if key in entry]
    return Bad(place, f"must have a {_expected(text_key)}; {', '.join(given) or 'has ' + _names(entry)}")


def _expected(text_key: str) -> str:
    return 'string under "text" or a list under "messages"' if text_key == "text" else f'string under "{text_key}"'


def _names(keys: Iterable[Any]) -> str:
    names = [f'"{key}"' for key in keys]
    return ", ".join(names[:5]) + (" and others" if len(names) > 5 else "") or "nothing"


def _type_name(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    known = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return known.get(type(value), type(value).__name__)


# -------------------------------------------------------------------------------------------------------------- tables


def _parquet(part: Part, text_key: str) -> Iterator[Document | Bad]:
    pyarrow, parquet = need("pyarrow", part.path), need("pyarrow.parquet", part.path)
    with open_bytes(part.path) as file:
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
        except (pyarrow.ArrowException, OSError) as error:
            yield _damage(None, "not a Parquet file, or truncated", error)
            return
        columns = _columns(names, text_key)
        if not columns:
            if part.begin == 0:  # report it once per file
                yield Bad(None, f"must have a column {_expected(text_key)}; has {_names(names)}")
            return
        sizes = [table.metadata.row_group(group).num_rows for group in range(part.end)]
        for group in range(part.begin, part.end):
            row = sum(sizes[:group])
            try:
                for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    yield from _rows(batch, row, text_key)
                    row += batch.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                yield _damage(row, f"rows {row} to {sum(sizes[: group + 1]) - 1} cannot be read", error)


def _damage(place: int | None, what: str, error: Exception) -> Bad:
    """pyarrow raises an OSError without errno for damage. One with errno comes from a disk or network, and is raised again."""
    if isinstance(error, OSError) and error.errno:
        raise error
    return Bad(place, f"{what}: {error}")


def _columns(names: list[str], text_key: str) -> list[str]:
    columns = [text_key, _MESSAGES] if text_key == "text" else [text_key]
    return [name for name in columns if name in names]


def _rows(batch: Any, first: int, text_key: str) -> Iterator[Document | Bad]:
    try:
        for row, entry in enumerate(batch.to_pylist(), first):
            yield _document(row, entry, text_key)
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield Bad(first, f"not UTF-8 text: {error}")
        else:  # in one of the rows
            for number in range(batch.num_rows):
                yield from _rows(batch.slice(number, 1), first + number, text_key)


def _dataset(part: Part, text_key: str) -> Iterator[Document | Bad]:
    data = open_dataset(part.path)
    columns = _columns(data.column_names, text_key)
    if not columns:
        if part.begin == 0:
            yield Bad(None, f"must have a column {_expected(text_key)}; has {_names(data.column_names)}")
        return
    data = data.select_columns(columns).with_format("arrow")
    for row in range(part.begin, part.end, _ROWS_AT_ONCE):
        yield from _rows(data[row : min(row + _ROWS_AT_ONCE, part.end)], row, text_key)


def _hub(part: Part, text_key: str) -> Iterator[Document | Bad]:
    stream, _ = open_hub(part.path)
    for row, entry in enumerate(stream.shard(num_shards=stream.num_shards, index=part.begin)):
        yield _document(row, entry, text_key)


SUFFIXES = {  # any other suffix: a text file, which is one document
    ".jsonl": "jsonl",
    ".jsonl.gz": "gzip",
    ".jsonl.zst": "zstd",
    ".parquet": "parquet",
}
READERS = {
    "text": _text,
    "jsonl": _jsonl,
    "gzip": _gzip,
    "zstd": _zstd,
    "parquet": _parquet,
    "dataset": _dataset,
    "hub": _hub,
}
