"""Token files in Megatron-LM's indexed format: NAME.bin, one row of ids, and NAME.idx, where its documents begin and end.

NAME.idx, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py, class _IndexWriter):

    9 bytes   "MMIDIDX" and two zero bytes
    uint64    version, 1
    uint8     code of the ids' type, see _TYPES
    uint64    sequences
    uint64    entries of the document index, one more than there are documents
    int32     tokens of each sequence
    int64     byte in NAME.bin at which each sequence begins
    int64     document index: the sequence with which each document begins, and at the end the number of sequences

We write one sequence a document. Others may write several, for example one a sentence. Sequences follow each other without
gaps, so a document's tokens are one slice of NAME.bin. Both files are mapped, never read as a whole.

Beside them titanlite may write NAME.loss: a byte a token, 1 where the token is to be predicted and 0 where it is only read
(what the user of a chat says). Without it every token is to be predicted.
"""

import bisect
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.errors import UserError

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floating-point


def smallest_type(vocabulary: int) -> np.dtype:
    """The smallest of the format's types that holds the ids below `vocabulary`. It has no uint32."""
    fits = (kind for kind in (np.uint8, np.uint16, np.int32, np.int64) if vocabulary - 1 <= np.iinfo(kind).max)
    return np.dtype(next(fits))


class Writer:
    """Writes NAME.bin as documents come, and NAME.idx on `close`; with `losses` NAME.loss too."""

    def __init__(self, prefix: Path, kind: np.dtype, losses: bool = False):
        """prefix: the files' path without its suffix."""
        self.prefix, self.kind = prefix, np.dtype(kind)
        self.lengths: list[int] = []
        self._bin = open(path_of(prefix, "bin"), "wb")
        self._loss = open(path_of(prefix, "loss"), "wb") if losses else None

    def add(self, ids: np.ndarray, loss: np.ndarray | None = None) -> None:
        """One document. ids (tokens,) integers; loss (tokens,) bool, by default all true."""
        assert len(ids) < 2**31, "the format counts a document's tokens in an int32"
        self._bin.write(ids.astype(self.kind, copy=False).tobytes())
        if self._loss is not None:
            self._loss.write(np.ones(len(ids), np.uint8).tobytes() if loss is None else loss.astype(np.uint8).tobytes())
        self.lengths.append(len(ids))

    def close(self) -> None:
        """Writes the index and closes all files."""
        self._bin.close()
        if self._loss is not None:
            self._loss.close()
        write_index(self.prefix, self.kind, np.array(self.lengths, np.int32))


def write_index(prefix: Path, kind: np.dtype, lengths: np.ndarray) -> None:
    """NAME.idx for documents of (documents,) int32 `lengths` tokens that stand one after the other."""
    code = next(code for code, known in _TYPES.items() if known == kind)
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    with open(path_of(prefix, "idx"), "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths * np.int64(kind.itemsize)).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def path_of(prefix: Path, suffix: str) -> Path:
    """NAME.suffix; a dot in NAME stays."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


class _Layout(NamedTuple):
    """What the head of NAME.idx says, and where its tables begin."""

    kind: np.dtype
    sequences: int
    documents: int
    lengths_at: int
    pointers_at: int
    documents_at: int
    end: int  # some writers put more behind, such as Megatron's modes
    described: int  # bytes of NAME.bin, by the last sequence
    document_index: tuple[int, int]  # its first and its last entry


class TokenFile:
    """NAME.bin with NAME.idx, mapped. It travels to other processes by its name, and is mapped anew there."""

    def __init__(self, prefix: Path):
        """Raises UserError that names the file at fault: missing, not of this format, truncated, or past the other's end.

        Only heads, sizes and the last entries are looked at, so that the largest file opens at once; `check` reads all.
        """
        self.prefix = prefix
        self._bin, self._idx, loss = (path_of(prefix, suffix) for suffix in ("bin", "idx", "loss"))
        try:
            layout = _read_layout(self._idx)
            size = self._bin.stat().st_size
            if size % layout.kind.itemsize:
                raise UserError(f"{self._bin}: truncated: {size} bytes are no whole number of {layout.kind.name} ids")
            self.ids = _mapped(self._bin, layout.kind, size // layout.kind.itemsize)  # (tokens,)
            index = _mapped(self._idx, np.dtype(np.uint8), layout.end)
            self.lengths = index[layout.lengths_at : layout.pointers_at].view("<i4")
            self.pointers = index[layout.pointers_at : layout.documents_at].view("<i8")
            self.first_sequences = index[layout.documents_at :].view("<i8")
            self.loss = _mapped(loss, np.dtype(np.uint8), loss.stat().st_size) if loss.exists() else None
        except OSError as error:
            raise UserError(f"{error.filename or prefix}: cannot be read: {error.strerror}") from None
        self.documents = layout.documents
        self._check_ends(layout)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.prefix,)

    def _check_ends(self, layout: _Layout) -> None:
        said, have = layout.described, self.tokens * layout.kind.itemsize
        if said > have:
            raise UserError(
                f"{self._bin}: truncated: it has {have:,} bytes, and {self._idx.name} describes {said:,}; or {self._idx.name} "
                "belongs to another file"
            )
        if said < have:
            raise UserError(
                f"{self._idx}: describes {said:,} bytes of the {have:,} in {self._bin.name}; it belongs to another file"
            )
        if layout.document_index != (0, layout.sequences):
            first, last = layout.document_index
            raise UserError(
                f"{self._idx}: its document index goes from sequence {first} to {last}, must be from 0 to {layout.sequences}"
            )
        if self.loss is not None and len(self.loss) != self.tokens:
            raise UserError(
                f"{path_of(self.prefix, 'loss')}: has {len(self.loss):,} bytes, must have one for each of the "
                f"{self.tokens:,} tokens"
            )

    def boundaries(self, first: int, last: int) -> np.ndarray:
        """Where the documents `first` .. `last` begin in `ids`, (last - first + 1,) int64; one past the last begins at the end.

        Raises UserError for places outside of the file, or that do not rise.
        """
        sequences = self.first_sequences[first : last + 1]
        inside = (sequences >= 0) & (sequences < len(self.pointers))
        places = np.full(len(sequences), self.tokens, np.int64)
        places[inside] = self.pointers[sequences[inside]] // self.ids.itemsize
        wrong = (sequences < 0) | (sequences > len(self.pointers)) | (places < 0) | (places > self.tokens)
        wrong |= np.diff(places, prepend=0) < 0
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{self._idx}: document {first + at} begins at token {places[at]}, with sequence {sequences[at]}: outside of "
                f"{self._bin.name}, or before the one before it"
            )
        return places

    def document_at(self, place: int) -> int:
        """The document that holds a token; place in [0, tokens). Reads twice log2(documents) entries of the index."""
        # np.searchsorted would copy the whole table, since the format does not align it to 8 bytes
        sequence = bisect.bisect_right(self.pointers, place * self.ids.itemsize) - 1
        return bisect.bisect_right(self.first_sequences, sequence) - 1

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, (documents,) int64. Reads the whole index, and checks it; raises UserError."""
        self.check()
        return np.diff(self.boundaries(0, self.documents))

    def check(self) -> None:
        """Reads the whole index. Raises UserError for sequences that do not follow each other."""
        ends = self.pointers + self.lengths.astype(np.int64) * self.ids.itemsize
        gaps = np.flatnonzero((self.lengths < 0) | (ends != np.append(self.pointers[1:], self.tokens * self.ids.itemsize)))
        if len(gaps):
            raise UserError(
                f"{self._idx}: sequence {gaps[0]} ends at byte {ends[gaps[0]]} of {self._bin.name}, "
                "where the next one does not begin"
            )
        if len(ends) and self.pointers[0]:
            raise UserError(f"{self._idx}: the first sequence begins at byte {self.pointers[0]} of {self._bin.name}, not at 0")
        if (np.diff(self.first_sequences) < 0).any():
            raise UserError(f"{self._idx}: its document index does not rise")


def _read_layout(path: Path) -> _Layout:
    """Reads the head of an index, and the ends of its tables: read and not mapped, since a mapped page counts as memory."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise UserError(f"{path}: not an index in Megatron's format: it begins with {head[:9]!r}")
        _, version, code, sequences, entries = _HEADER.unpack(head)
        if version != _VERSION:
            raise UserError(f"{path}: version {version} of Megatron's format; only version {_VERSION} is known")
        if code not in _TYPES:
            known = ", ".join(f"{number} ({np.dtype(kind).name})" for number, kind in _TYPES.items())
            raise UserError(f"{path}: ids of type {code}; known are {known}")
        if entries < 1:
            raise UserError(f"{path}: has no document index")
        lengths_at = _HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        end = documents_at + 8 * entries
        if size < end:
            raise UserError(f"{path}: truncated: {size:,} bytes of {end:,}")

        def number_at(place: int, layout: str) -> int:
            file.seek(place)
            return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]

        kind = np.dtype(_TYPES[code])
        described = 0
        if sequences:
            described = number_at(documents_at - 8, "<q") + number_at(pointers_at - 4, "<i") * kind.itemsize
        document_index = number_at(documents_at, "<q"), number_at(end - 8, "<q")
    return _Layout(kind, sequences, entries - 1, lengths_at, pointers_at, documents_at, end, described, document_index)


def _mapped(path: Path, kind: np.dtype, count: int) -> np.ndarray:
    """A file as an array, (count,). A mapping cannot be empty, so nothing is mapped of nothing."""
    return np.memmap(path, kind, "r", 0, (count,)).view(np.ndarray) if count else np.zeros(0, kind)
