"""Reads the documents of every kind of input, in order; an entry that is not a document is reported with its location.

The suffix of a file decides how it is read; `KINDS` lists them all. Parquet, saved datasets, the hub and URLs are read by
pyarrow, datasets and fsspec. Lines of JSON are read here: pyarrow.json rejects a whole file for one bad line, whose number it
counts from the start of a block; datasets first copies the text to its cache. Neither reads a byte range of a file, which is
how several workers share one.
"""

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.data.prepare.open_files import DAMAGES, PACKINGS, is_url, need, open_bytes, open_unpacked, packing_of, plain_name
from titanlite.data.tokenizer import digest
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import parse_json

HUB = "hub:"
_FORM_OF_HUB = "; write hub:NAME:CONFIG:SPLIT, or without a configuration as hub:HuggingFaceH4/ultrachat_200k::train_sft"
_MESSAGES = "messages"  # the key of a chat, an alternative to a text under the default key
_OTHER_KEY = "; `titanlite tokenize --text-key NAME` reads another"
_TOOLS = "tools"  # beside it: the functions that the assistant may call
_ROWS_AT_ONCE = 128  # a row may be a book
_BYTES_AT_ONCE = 2**20
_BOM = b"\xef\xbb\xbf"  # the byte order mark that some Windows programs write at the start of a UTF-8 file


class InputRange(NamedTuple):
    """A range of an input that is read independently."""

    path: str  # a file, a URL, a folder that a dataset was saved to, or hub:NAME
    kind: str  # of READERS
    begin: int  # .jsonl: a byte; .parquet: a row group; dataset: a row; hub: a shard of the stream; else 0
    end: int  # exclusive
    size: int  # approximate bytes


class Document(NamedTuple):
    """A text, or the messages of a chat."""

    location: int | None  # as for `where`
    content: str | list[Any]
    tools: Any = None  # of a chat, as in the file
    beside_chat: bool = False  # a text whose entry has a chat too


class Bad(NamedTuple):
    """An entry that is not a document."""

    location: int | None
    reason: str


class BadDocument(UserError):
    """An input holds an entry that is not a document, and --on-error is "fail"."""


def read(part: InputRange, text_key: str) -> Iterator[Document | Bad]:
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


def where(part: InputRange, location: int | None) -> tuple[str, int | None]:
    """(file, line or row) of an entry that `read` yielded. Lines count from 1; rows from 0, as in `dataset[row]`.

    Reads the file up to the part to count its lines, so it is called for bad entries only.
    """
    if part.kind == "hub":
        return f"{part.path}, shard {part.begin}", location
    if part.kind == "jsonl" and part.begin and location is not None:
        with open_bytes(part.path) as file:
            left, lines = part.begin - 1, 1
            while left and (block := file.read(min(left, _BYTES_AT_ONCE))):
                lines += block.count(b"\n")
                left -= len(block)
        return part.path, lines + location
    return part.path, location


def describe_location(file: str, location: int | None) -> str:
    """The result of `where` in words."""
    word = "line" if kind_of(file) in ("jsonl", "json", "csv", "tsv") else "row"
    return file if location is None else f"{file}, {word} {location}"


def kind_of(path: str) -> str | None:
    """The reader of a file or URL, by its suffix: a key of READERS. None: not a known kind of text."""
    name, packing = plain_name(path).removesuffix(packing_of(path)), packing_of(path)
    kind = next((kind for kind, suffixes in KINDS.items() if name.endswith(suffixes)), None)
    return None if packing and kind == "parquet" else kind  # Parquet compresses its columns itself


def known_kinds() -> str:
    """The suffixes that are read, for messages."""
    suffixes = " ".join(itertools.chain.from_iterable(KINDS.values()))
    return f"known are {suffixes}, and each but .parquet also with {' or '.join(PACKINGS)} appended"


def open_hub(path: str) -> tuple[Any, str]:
    """The stream of hub:NAME[:CONFIG] or hub:NAME:[CONFIG]:SPLIT, a datasets.IterableDataset, and a digest of its version.

    Raises UserError where it cannot be opened.
    """
    datasets = need("datasets", path)
    name, config, split = (*path.removeprefix(HUB).split(":", 2), "", "")[:3]
    if not (name and Path(name).is_dir()) and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        raise UserError(f"{path}: cannot be opened: no such folder, and the hub's datasets are called NAME or OWNER/NAME")
    datasets.disable_progress_bars()  # each worker would draw one
    try:
        builder = datasets.load_dataset_builder(name, config or None)
        stream = builder.as_streaming_dataset(split=split or "train")
    except Exception as error:
        form = _FORM_OF_HUB if isinstance(error, ValueError) else ""  # no such configuration or split
        raise UserError(f"{path}: cannot be opened: {type(error).__name__}: {error}{form}") from None
    files = (builder.config.data_files or {}).get(split or "train")
    # data files have the commit of a dataset on the hub, or modification times in a folder
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


def _text(part: InputRange, _text_key: str) -> Iterator[Document | Bad]:
    with open_unpacked(part.path) as file:
        try:
            content = file.read()
        except DAMAGES as error:
            yield _damaged(None, error)
            return
    try:
        yield Document(None, content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Bad(None, f"not UTF-8 text: line {line}, byte {error.start}: {error.reason}")


def _jsonl(part: InputRange, text_key: str) -> Iterator[Document | Bad]:
    """The entries of the lines whose first byte is in the part; of all lines of a compressed file, which has one part."""
    with open_unpacked(part.path) as file:
        at = part.begin
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # skip the rest of a line that the previous part reads
        lines = file if packing_of(part.path) else _lines_until(file, at, part.end)
        yield from _until_damage(lines, lambda lines: _entries(lines, text_key))


def _lines_until(file: Iterable[bytes], at: int, end: int) -> Iterator[bytes]:
    if at < end:
        for line in file:
            yield line
            at += len(line)
            if at >= end:
                return


def _json(part: InputRange, text_key: str) -> Iterator[Document | Bad]:
    """Lines of JSON if the first line is an object, as in many data sets; else one array of entries, or one entry."""
    with open_unpacked(part.path) as file:
        yield from _until_damage(file, lambda lines: _lines_or_array(lines, text_key))


def _lines_or_array(lines: Iterator[bytes], text_key: str) -> Iterator[Document | Bad]:
    begin: list[bytes] = []  # up to the first line that is not empty
    while not b"".join(begin).strip():
        if not (line := next(lines, b"")):
            return
        begin.append(line)
    first = None
    with contextlib.suppress(ValueError):  # of the parser alone: what reading raises is no fault of the JSON
        first = _parsed(b"".join(begin))
    if isinstance(first, dict):
        yield from _entries(itertools.chain(begin, lines), text_key)
        return
    content = b"".join(itertools.chain(begin, lines))
    try:
        value = _parsed(content)
    except ValueError as error:
        yield Bad(None, str(error))
        return
    for number, entry in enumerate(value if isinstance(value, list) else [value], 1):
        document = _without_surrogates(_document(None, entry, text_key))
        yield document if isinstance(document, Document) else Bad(None, f"entry {number}: {document.reason}")


def _csv(part: InputRange, text_key: str, delimiter: str) -> Iterator[Document | Bad]:
    with open_unpacked(part.path) as file:
        yield from _until_damage(file, lambda lines: _csv_rows(lines, text_key, delimiter))


def _csv_rows(lines: Iterator[bytes], text_key: str, delimiter: str) -> Iterator[Document | Bad]:
    """The rows below the header, each with the line that it begins on; a field in double quotes may have several lines."""
    csv.field_size_limit(2**31 - 1)  # for the whole process; a field may be a book
    lines = itertools.chain([next(lines, b"").removeprefix(_BOM)], lines)  # else a quote behind it would begin no field
    text = (line.decode("utf-8", "surrogateescape") for line in lines)  # so that a bad byte affects its row alone
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Bad(line, f"not CSV: {error}")
            continue
        if not header:
            header = row
            if header and text_key not in header:
                yield Bad(None, f'must have a column "{text_key}"; its first line has {_names(header)}{_OTHER_KEY}')
                return
        elif row:
            yield _csv_document(line, row, header, text_key)


def _csv_document(line: int, row: list[str], header: list[str], text_key: str) -> Document | Bad:
    if len(row) != len(header):
        return Bad(line, f"has {len(row)} fields, but the first line has {len(header)}")
    content = row[header.index(text_key)]
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        return Bad(line, f"not UTF-8 text: byte 0x{ord(content[error.start]) - 0xDC00:x}")
    return Document(line, content)


def _until_damage(
    lines: Iterable[bytes], read_lines: Callable[[Iterator[bytes]], Iterator[Document | Bad]]
) -> Iterator[Document | Bad]:
    """What `read_lines` makes of the lines of a file, and last the line at which a compressed file is damaged."""
    number = 0

    def counted() -> Iterator[bytes]:
        nonlocal number
        for number, line in enumerate(lines, 1):  # noqa: B007, used below
            yield line

    try:
        yield from read_lines(counted())
    except DAMAGES as error:
        yield _damaged(number + 1, error)


def _damaged(location: int | None, error: Exception) -> Bad:
    return Bad(location, f"the compressed file is damaged or truncated here: {error}")


def _entries(lines: Iterable[bytes], text_key: str) -> Iterator[Document | Bad]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = _parsed(line)
        except ValueError as error:
            yield Bad(number, str(error))
            continue
        document = _document(number, entry, text_key)
        # only such an escape can spell half a surrogate pair, which no tokenizer can encode
        escaped = b"\\ud" in line or b"\\uD" in line
        yield _without_surrogates(document) if escaped else document


def _parsed(content: bytes) -> Any:
    """Parses JSON. Raises ValueError with the reason where it is invalid."""
    try:
        return parse_json(content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON that can be read: {error}") from None


def _without_surrogates(document: Document | Bad) -> Document | Bad:
    if isinstance(document, Document):
        try:
            json.dumps([document.content, document.tools], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return Bad(document.location, "not Unicode text: half of a surrogate pair (\\ud800 to \\udfff)")
    return document


def _document(location: int | None, entry: Any, text_key: str) -> Document | Bad:
    if not isinstance(entry, dict):
        return Bad(location, f"must be an object with a {_expected(text_key)}, is {_type_name(entry)}")
    text = entry.get(text_key)
    if isinstance(text, str):
        return Document(location, text, beside_chat=text_key == "text" and isinstance(entry.get(_MESSAGES), list))
    if text is None and text_key == "text" and isinstance(entry.get(_MESSAGES), list):
        return Document(location, entry[_MESSAGES], entry.get(_TOOLS))
    given = [f'"{key}" is {_type_name(entry[key])}' for key in (text_key, _MESSAGES) if key in entry]
    return Bad(location, f"must have a {_expected(text_key)}; {', '.join(given) or 'has ' + _names(entry) + _OTHER_KEY}")


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


def _parquet(part: InputRange, text_key: str) -> Iterator[Document | Bad]:
    pyarrow, parquet = need("pyarrow", part.path), need("pyarrow.parquet", part.path)
    with open_bytes(part.path) as file:
        try:
            table = parquet.ParquetFile(file, page_checksum_verification=True)  # where the file has checksums
            names = table.schema_arrow.names
        except (pyarrow.ArrowException, OSError) as error:
            yield _damage(None, "not a Parquet file, or truncated", error)
            return
        columns = _columns(names, text_key)
        if not columns:
            if part.begin == 0:  # report it once per file
                yield Bad(None, f"must have a column {_expected(text_key)}; has {_names(names)}{_OTHER_KEY}")
            return
        sizes = [table.metadata.row_group(group).num_rows for group in range(part.end)]
        for group in range(part.begin, part.end):
            first = row = sum(sizes[:group])
            try:
                for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    yield from _rows(batch, row, text_key)
                    row += batch.num_rows
                if row - first != sizes[group]:
                    yield Bad(None, f"damaged: row group {group} must have {sizes[group]:,} rows, but has {row - first:,}")
            except (pyarrow.ArrowException, OSError) as error:
                yield _damage(row, f"rows {row} to {sum(sizes[: group + 1]) - 1} cannot be read", error)


def _damage(location: int | None, what: str, error: Exception) -> Bad:
    """pyarrow raises an OSError without errno for damage. One with errno comes from a disk or network, and is raised again."""
    if isinstance(error, OSError) and error.errno:
        raise error
    return Bad(location, f"{what}: {error}")


def _columns(names: list[str], text_key: str) -> list[str]:
    columns = [text_key, _MESSAGES] if text_key == "text" else [text_key]
    found = [name for name in columns if name in names]
    return [*found, _TOOLS] if _MESSAGES in found and _TOOLS in names else found


def _rows(batch: Any, first: int, text_key: str) -> Iterator[Document | Bad]:
    try:
        for row, entry in enumerate(batch.to_pylist(), first):
            yield _row(row, entry, text_key)
    except (ValueError, OverflowError) as error:  # invalid text, or a date outside of Python's range
        if batch.num_rows == 1:
            what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
            yield Bad(first, f"{what}: {error}")
        else:  # one of the rows has the fault
            for number in range(batch.num_rows):
                yield from _rows(batch.slice(number, 1), first + number, text_key)


def _row(row: int, entry: Any, text_key: str) -> Document | Bad:
    """The document of a row. A column gives each object of its chats the keys of all, null where it had none of its own."""
    found = _document(row, entry, text_key)
    if isinstance(found, Document) and isinstance(found.content, list):
        found = Document(row, _without_nulls(found.content), _without_nulls(found.tools))
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        # as in OpenAI's format, a message that only calls functions has "content": null
        return {key: _without_nulls(each) for key, each in value.items() if each is not None or key == "content"}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _dataset(part: InputRange, text_key: str) -> Iterator[Document | Bad]:
    data = open_dataset(part.path)
    columns = _columns(data.column_names, text_key)
    if not columns:
        if part.begin == 0:
            yield Bad(None, f"must have a column {_expected(text_key)}; has {_names(data.column_names)}{_OTHER_KEY}")
        return
    data = data.select_columns(columns).with_format("arrow")
    for row in range(part.begin, part.end, _ROWS_AT_ONCE):
        yield from _rows(data[row : min(row + _ROWS_AT_ONCE, part.end)], row, text_key)


def _hub(part: InputRange, text_key: str) -> Iterator[Document | Bad]:
    stream, _ = open_hub(part.path)
    for row, entry in enumerate(stream.shard(num_shards=stream.num_shards, index=part.begin)):
        yield _row(row, entry, text_key)


KINDS = {  # reader: the suffixes of its files, in lower case
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "text": (
        *(".txt", ".text", ".md", ".markdown", ".rst", ".tex"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".java", ".kt", ".scala", ".go", ".rs"),
        *(".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".swift", ".lua", ".jl", ".r", ".hs", ".pl", ".sh", ".sql"),
    ),
}
READERS: dict[str, Callable[[InputRange, str], Iterator[Document | Bad]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": partial(_csv, delimiter=","),
    "tsv": partial(_csv, delimiter="\t"),
    "parquet": _parquet,
    "text": _text,
    "dataset": _dataset,
    "hub": _hub,
}
