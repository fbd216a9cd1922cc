"""Token files in Megatron-LM's indexed format: NAME.bin holds the ids, NAME.idx where documents begin and end.

NAME.idx, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py, class _IndexWriter):

    9 bytes   "MMIDIDX" and two zero bytes
    uint64    version, 1
    uint8     code of the ids' type, see _DTYPES
    uint64    sequences
    uint64    entries of the document index, one more than there are documents
    int32     tokens of each sequence
    int64     byte in NAME.bin at which each sequence begins
    int64     document index: the first sequence of each document, and at the end the number of sequences

We write one sequence per document. Others may write several, for example one per sentence. Sequences follow each other without
gaps, so a document's tokens are one slice of NAME.bin. Both files are mapped, never read as a whole.

titanlite may write NAME.loss beside them: a byte per token, 1 where the token is a label and 0 where it is only input (the
user's turns of a chat). Without this file every token is a label.
"""

import bisect
import os
import resource
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.errors import UserError
from titanlite.outside import open_file, size_of

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floating-point


def smallest_type(vocabulary: int) -> np.dtype:
    """The smallest of the format's types that holds the ids below `vocabulary`. It has no uint32."""
    fits = (dtype for dtype in (np.uint8, np.uint16, np.int32, np.int64) if vocabulary - 1 <= np.iinfo(dtype).max)
    return np.dtype(next(fits))


def write_index(prefix: Path, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Writes NAME.idx for consecutive documents of `lengths` tokens, (documents,) int32."""
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    with open(path_of(prefix, "idx"), "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths * np.int64(dtype.itemsize)).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def path_of(prefix: Path, suffix: str) -> Path:
    """NAME.suffix; dots in NAME are kept."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


class Mapped:
    """Maps files at their first read. Pickled, it leaves the arrays out: each process maps the files that it reads."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, np.ndarray)}


class TokenFile(Mapped):
    """NAME.bin with NAME.idx, each mapped at its first read.

    tokens, documents: how many it holds. has_loss: whether NAME.loss exists.

    A pickled TokenFile holds sizes and offsets: another process of this machine neither opens nor checks what it does not read.
    """

    def __init__(self, prefix: Path):
        """Raises UserError that names the faulty file: missing, of another format, truncated, or longer than the index says.

        Reads only the header, the sizes and the last entries, so that the largest file opens at once; `check` reads all.
        """
        self.prefix = prefix
        self._read_sizes()

    def _read_sizes(self) -> None:
        """Reads the header of the index and the ends of its tables, and checks them against the sizes of the files.

        They are read, not mapped, since a mapped page counts as memory.
        """
        ids, index, loss = (path_of(self.prefix, suffix) for suffix in ("bin", "idx", "loss"))
        with open_file(index) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                raise UserError(f"{index}: not an index in Megatron's format: it begins with {header[:9]!r}")
            _, version, code, sequences, entries = _HEADER.unpack(header)
            if version != _VERSION:
                raise UserError(f"{index}: version {version} of Megatron's format; only version {_VERSION} is supported")
            if code not in _DTYPES:
                known = ", ".join(f"{number} ({np.dtype(dtype).name})" for number, dtype in _DTYPES.items())
                raise UserError(f"{index}: ids of type {code}; supported are {known}")
            if entries < 1:
                raise UserError(f"{index}: has no document index")
            pointers_at = _HEADER.size + 4 * sequences
            documents_at = pointers_at + 8 * sequences
            end = documents_at + 8 * entries
            if size < end:
                raise UserError(f"{index}: truncated: {size:,} bytes of {end:,}")

            def number_at(offset: int, form: str) -> int:
                return struct.unpack(form, os.pread(file.fileno(), struct.calcsize(form), offset))[0]

            dtype = np.dtype(_DTYPES[code])
            described = 0  # bytes of NAME.bin, by the last sequence
            if sequences:
                described = number_at(documents_at - 8, "<q") + number_at(pointers_at - 4, "<i") * dtype.itemsize
            first, last = number_at(documents_at, "<q"), number_at(end - 8, "<q")
        actual = size_of(ids)
        if described != actual:
            raise UserError(
                f"{ids}: has {actual:,} bytes, and {index.name} describes {described:,}: one of them is truncated, or they are "
                "not of the same data"
            )
        if (first, last) != (0, sequences):
            raise UserError(f"{index}: its document index goes from sequence {first} to {last}, must be from 0 to {sequences}")
        self.tokens, self.documents, self.has_loss = actual // dtype.itemsize, entries - 1, os.path.lexists(loss)
        self._dtype, self._tables = dtype, (_HEADER.size, pointers_at, documents_at, end)
        if self.has_loss and (flags := size_of(loss)) != self.tokens:
            raise UserError(f"{loss}: has {flags:,} bytes, must have one for each of the {self.tokens:,} tokens")

    @cached_property
    def ids(self) -> np.ndarray:
        """(tokens,) of the file's integer type."""
        return _map(path_of(self.prefix, "bin"), self._dtype, self.tokens)

    @cached_property
    def loss(self) -> np.ndarray | None:
        """(tokens,) uint8, 1 where a token is a label; None: all are."""
        return _map(path_of(self.prefix, "loss"), np.dtype(np.uint8), self.tokens) if self.has_loss else None

    @cached_property
    def _index(self) -> np.ndarray:
        return _map(path_of(self.prefix, "idx"), np.dtype(np.uint8), self._tables[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(sequences,) int32."""
        return self._index[self._tables[0] : self._tables[1]].view("<i4")

    @cached_property
    def pointers(self) -> np.ndarray:
        """(sequences,) int64, the byte of NAME.bin at which each begins."""
        return self._index[self._tables[1] : self._tables[2]].view("<i8")

    @cached_property
    def first_sequences(self) -> np.ndarray:
        """(documents + 1,) int64."""
        return self._index[self._tables[2] :].view("<i8")

    def boundaries(self, first: int, last: int) -> np.ndarray:
        """Where the documents `first` .. `last` begin in `ids`, (last - first + 1,) int64; one past the last begins at the end.

        Raises UserError for positions outside of the file, or that decrease.
        """
        sequences = self.first_sequences[first : last + 1]
        inside = (sequences >= 0) & (sequences < len(self.pointers))
        begins = np.full(len(sequences), self.tokens, np.int64)
        begins[inside] = self.pointers[sequences[inside]] // self._dtype.itemsize
        wrong = (sequences < 0) | (sequences > len(self.pointers)) | (begins < 0) | (begins > self.tokens)
        wrong |= np.diff(begins, prepend=0) < 0
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{path_of(self.prefix, 'idx')}: document {first + at} begins at token {begins[at]}, with sequence "
                f"{sequences[at]}: outside of {self.prefix.name}.bin, or before the previous document"
            )
        return begins

    def document_at(self, token: int) -> int:
        """The document that holds a token, in [0, tokens). Reads twice log2(documents) entries of the index."""
        # np.searchsorted would copy the whole table, since the format does not align it to 8 bytes
        sequence = bisect.bisect_right(self.pointers, token * self._dtype.itemsize) - 1
        return bisect.bisect_right(self.first_sequences, sequence) - 1

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, (documents,) int64. Reads and checks the whole index; raises UserError."""
        self.check()
        return np.diff(self.boundaries(0, self.documents))

    def check(self) -> None:
        """Reads the whole index. Raises UserError for sequences that do not follow each other."""
        index, lengths = path_of(self.prefix, "idx"), self.lengths.astype(np.int64) * self._dtype.itemsize
        begins = np.cumsum(lengths) - lengths  # of each sequence, in bytes
        wrong = np.flatnonzero((lengths < 0) | (self.pointers != begins))
        if len(wrong):
            at = wrong[0]
            raise UserError(
                f"{index}: sequence {at} has {self.lengths[at]} tokens at byte {self.pointers[at]} of {self.prefix.name}.bin; "
                f"the sequences before it end at byte {begins[at]}"
            )
        if (np.diff(self.first_sequences) < 0).any():
            raise UserError(f"{index}: its document index decreases")


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """A file as an array, (count,). Raises UserError where it is missing or has become shorter."""
    if not count:
        return np.zeros(0, dtype)  # an empty mapping does not exist
    # A mapping keeps a file descriptor, and a trillion tokens are a thousand shards of two files: leave the rest as many as
    # they had.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (hard, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, hard))
    try:
        return np.memmap(path, dtype, "r", 0, (count,)).view(np.ndarray)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: truncated since it was opened: it must hold {count:,} numbers") from None
