"""Token files in Megatron-LM's indexed format: NAME.bin holds the ids, NAME.idx where documents begin and end.

NAME.idx, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py, class _IndexWriter):

    9 bytes   "MMIDIDX" and two zero bytes
    uint64    version, 1
    uint8     code of the ids' type, see DTYPES
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
import struct
from pathlib import Path

import numpy as np

from titanlite.data.blocks import Array, BlockFile
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import open_file, size_of

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
_AT_ONCE = 2**16  # sequences whose entries are checked together
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floating-point


def path_of(prefix: Path, suffix: str) -> Path:
    """NAME.suffix; dots in NAME are kept."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


class TokenFile:
    """NAME.bin with NAME.idx, each mapped at its first read. What is read is verified: see blocks.py.

    tokens, documents: how many it holds. files: all of its files.

    ids (tokens,) of the file's integer type. loss (tokens,) uint8, 1 where a token is a label; None: all are. lengths
    (sequences,) int32. pointers (sequences,) int64, the byte of NAME.bin at which each begins. first_sequences (documents + 1,)
    int64.

    A pickled TokenFile holds sizes and offsets: another process of this machine neither opens nor checks what it does not read.
    """

    def __init__(self, prefix: Path):
        """Raises UserError that names the faulty file: missing, of another format, truncated, or longer than the index says.

        Reads only the header, the sizes and the last entries, so that the largest file opens at once; `document_lengths` reads
        all.
        """
        self.prefix = prefix
        # what is read here is not mapped, since a mapped page counts as memory
        ids, index, loss = (path_of(self.prefix, suffix) for suffix in ("bin", "idx", "loss"))
        with open_file(index) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise UserError(f"{index}: not an index in Megatron's format: it begins with {header[:9]!r}")
            _, version, code, sequences, entries = HEADER.unpack(header)
            if version != VERSION:
                raise UserError(f"{index}: version {version} of Megatron's format; only version {VERSION} is supported")
            if code not in DTYPES:
                known = ", ".join(f"{number} ({np.dtype(dtype).name})" for number, dtype in DTYPES.items())
                raise UserError(f"{index}: ids of type {code}; supported are {known}")
            if entries < 1:
                raise UserError(f"{index}: has no document index")
            pointers_at = HEADER.size + 4 * sequences
            documents_at = pointers_at + 8 * sequences
            end = documents_at + 8 * entries
            if size < end:
                raise UserError(f"{index}: truncated: {size:,} bytes of {end:,}")

            def number_at(offset: int, form: str) -> int:
                return struct.unpack(form, os.pread(file.fileno(), struct.calcsize(form), offset))[0]

            dtype = np.dtype(DTYPES[code])
            described = 0  # bytes of NAME.bin, by the last sequence
            if sequences:
                described = number_at(documents_at - 8, "<q") + number_at(pointers_at - 4, "<i") * dtype.itemsize
            first, last = number_at(documents_at, "<q"), number_at(end - 8, "<q")
        actual = size_of(ids)
        if described != actual:
            why = "one of them is truncated, or they are not of the same data"
            raise UserError(f"{ids}: has {actual:,} bytes, and {index.name} describes {described:,}: {why}")
        if (first, last) != (0, sequences):
            raise UserError(f"{index}: its document index goes from sequence {first} to {last}, must be from 0 to {sequences}")
        self.tokens, self.documents, self.loss = actual // dtype.itemsize, entries - 1, None
        bin_file, idx_file = BlockFile(ids, actual), BlockFile(index, size)
        self.files = [bin_file, idx_file]
        if os.path.lexists(loss):
            if (flags := size_of(loss)) != self.tokens:
                raise UserError(f"{loss}: has {flags:,} bytes, must have one for each of the {self.tokens:,} tokens")
            self.files.append(BlockFile(loss, flags))
            self.loss = Array(self.files[2], np.dtype(np.uint8), 0, self.tokens)
        self.ids = Array(bin_file, dtype, 0, self.tokens)
        self.lengths = Array(idx_file, np.dtype("<i4"), HEADER.size, sequences)
        self.pointers = Array(idx_file, np.dtype("<i8"), pointers_at, sequences)
        self.first_sequences = Array(idx_file, np.dtype("<i8"), documents_at, entries)
        self._consistent: set[int] = set()  # groups of sequences that were checked
        idx_file.verify(0, HEADER.size)

    def boundaries(self, first: int, last: int) -> np.ndarray:
        """Where the documents `first` .. `last` begin in `ids`, (last - first + 1,) int64; one past the last begins at the end.

        The documents follow each other, inside of the file. Raises UserError for an index that says otherwise.
        """
        sequences, count = self.first_sequences[first : last + 1], len(self.pointers)
        wrong = (sequences < 0) | (sequences > count)
        wrong[1:] |= sequences[1:] < sequences[:-1]
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{path_of(self.prefix, 'idx')}: document {first + at} begins with sequence {sequences[at]}: before the "
                f"previous document, or not one of the {count} sequences"
            )
        begin, end = int(sequences[0]), min(int(sequences[-1]) + 1, count)
        self._check_sequences(begin, end)
        begins = np.append(self.pointers[begin:end] // self.ids.dtype.itemsize, self.tokens)
        return begins[sequences - begin]

    def document_at(self, token: int) -> int:
        """The document that holds a token, in [0, tokens). Reads twice log2(documents) entries of the index, not verified."""
        # np.searchsorted would copy the whole table, since the format does not align it to 8 bytes
        sequence = bisect.bisect_right(self.pointers.numbers, token * self.ids.dtype.itemsize) - 1
        return bisect.bisect_right(self.first_sequences.numbers, sequence) - 1

    def documents_of(self, first: int, last: int) -> tuple[int, list[int]]:
        """(the document of token `first`, where it and the ones after it begin, and where that of token `last` ends).

        Raises UserError for an index that is wrong there.
        """
        begin, end = self.document_at(first), self.document_at(last)
        if 0 <= begin <= end < self.documents:
            edges = self.boundaries(begin, end + 1).tolist()
            if edges[0] <= first < edges[1] and edges[-2] <= last < edges[-1]:
                return begin, edges
        raise UserError(f"{path_of(self.prefix, 'idx')}: the documents at tokens {first} to {last} do not follow each other")

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, (documents,) int64. Reads and checks the whole index; raises UserError."""
        return np.diff(self.boundaries(0, self.documents))

    def _check_sequences(self, begin: int, end: int) -> None:
        """Checks the sequences `begin` .. `end`, and others near them, at their first read."""
        for group in range(begin // _AT_ONCE, -(-end // _AT_ONCE)):
            if group not in self._consistent:
                self._check_group(max(0, group * _AT_ONCE - 1), (group + 1) * _AT_ONCE)
                self._consistent.add(group)

    def _check_group(self, begin: int, end: int) -> None:
        """Raises UserError for sequences that do not follow each other, or are not inside of NAME.bin."""
        pointers, itemsize = self.pointers[begin:end], self.ids.dtype.itemsize
        lengths = self.lengths[begin:end].astype(np.int64) * itemsize
        expected = np.concatenate([pointers[:1] if begin else [0], (pointers + lengths)[:-1]])
        wrong = (lengths < 0) | (pointers != expected) | (pointers < 0) | (pointers + lengths > self.tokens * itemsize)
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{path_of(self.prefix, 'idx')}: sequence {begin + at} has {lengths[at] // itemsize} tokens at byte "
                f"{pointers[at]} of {self.prefix.name}.bin; the sequences before it end at byte {expected[at]}"
            )
