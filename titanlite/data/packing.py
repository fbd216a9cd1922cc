"""Best-fit packing: whole documents combined into rows with as little padding as possible.

Best-fit decreasing: the longest piece first, each into the fullest row that has room for it (Ding et al., "Fewer truncations
improve language modeling", arXiv:2404.10830). A document longer than a row is cut. Its parts share one token: the last label of
a part is the first input of the next, so that no label is lost.
"""

import operator
from pathlib import Path

import numpy as np

from titanlite.data.blocks import Array, BlockFile, BlockWriter
from titanlite.data.indexed import TokenFile
from titanlite.errors import UserError
from titanlite.outside import size_of

_HEADER = 5  # numbers before the tables


class Packing:
    """The rows of one token file: the pieces of documents in each, in order."""

    def __init__(self, path: Path, file: TokenFile):
        """path: what `pack_file` wrote for `file`. Raises ValueError for anything else, or UserError."""
        self.path = path
        self.stored = BlockFile(path, size_of(path))  # which refuses a FIFO, where numpy would wait
        if self.stored.has_sums:
            self.stored.verify(0, 1)
        elif file.files[0].has_sums:
            raise ValueError("it has no checksums, and that has")
        try:
            mapped = np.load(path, mmap_mode="r")
        except (EOFError, OSError) as error:
            raise ValueError(error) from None
        self._table = table = Array(self.stored, mapped.dtype, mapped.offset, mapped.size)
        tokens, documents, self.rows, self._pieces, self.kept = (int(number) for number in table[:_HEADER])
        if len(table) != _HEADER + self.rows + 1 + 2 * self._pieces:
            raise ValueError(f"{len(table)} numbers, {self.rows} rows and {self._pieces} pieces")
        if (tokens, documents) != (file.tokens, file.documents):
            raise ValueError(f"made of {tokens} tokens in {documents} documents")
        self._tokens = tokens

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(first token in the file, tokens) of each piece of a row. Raises UserError for pieces outside of the file."""
        table = self._table.checked()
        begin, end = table[_HEADER + row : _HEADER + row + 2].tolist()
        start = _HEADER + self.rows + 1 + begin
        starts, lengths = (table[at : at + end - begin].tolist() for at in (start, start + self._pieces))
        if not self.stored.has_sums and (
            not starts or min(starts) < 0 or min(lengths) < 1 or max(map(operator.add, starts, lengths)) > self._tokens
        ):
            raise UserError(f"{self.path}: is damaged: row {row} is not of pieces of its file; remove it, and it is made again")
        return list(zip(starts, lengths, strict=True))


def pack_file(prefix: Path, seq_len: int, target: Path) -> None:
    """Packs the documents of a token file into rows of seq_len + 1 tokens, and writes them to `target`, an .npy file.

    The file is one array of int64. Header: tokens and documents of the token file, rows, pieces, tokens of all pieces. Tables:
    the first piece of each row and at the end the number of pieces; the first token of each piece; the tokens of each piece.
    """
    file = TokenFile(prefix)
    starts, lengths = _cut(file.boundaries(0, file.documents), seq_len)
    row_of = best_fit(lengths, seq_len + 1)
    order = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of)
    header = np.array([file.tokens, file.documents, len(counts), len(lengths), lengths.sum()])
    with BlockWriter(target) as out:
        np.save(out, np.concatenate([header, [0], np.cumsum(counts), starts[order], lengths[order]]).astype(np.int64))


def _cut(boundaries: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the parts of at most seq_len + 1 tokens that documents are cut into.

    boundaries (documents + 1,) int64: where each begins and where the last one ends. A document of a single token has no label
    and is left out.
    """
    labels = np.diff(boundaries) - 1
    parts = np.maximum(0, -(-labels // seq_len))
    document = np.repeat(np.arange(len(labels)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)  # of the part in its document
    return boundaries[document] + number * seq_len, np.minimum(labels[document] - number * seq_len, seq_len) + 1


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, (pieces,) int64, rows numbered from 0 without gaps; lengths (pieces,) are at most `capacity`.

    Places all pieces of one length together, into all rows with the same room at once. That takes a few operations per length
    instead of several per piece: a million pieces a second.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    rows = 0
    room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # free tokens -> groups of rows with that many
    any_with = np.zeros(capacity + 1, bool)  # free tokens -> whether there are such rows

    def give_back(group: np.ndarray, free: int) -> None:
        if len(group):
            room[free].append(group)
            any_with[free] = True

    for same in np.split(by_length, np.flatnonzero(np.diff(lengths[by_length])) + 1):
        while len(same):
            length = int(lengths[same[0]])
            free = length + int(any_with[length:].argmax())
            if any_with[free]:
                chosen = room[free].pop()
                any_with[free] = bool(room[free])
            else:
                free, new = capacity, -(-len(same) // (capacity // length))
                chosen = np.arange(rows, rows + new)
                rows += new
            fit = free // length  # pieces per row, before another row becomes the fullest with room
            needed = -(-len(same) // fit)
            give_back(chosen[needed:], free)
            chosen = chosen[:needed]
            placed = min(len(same), fit * len(chosen))
            row_of[same[:placed]] = np.repeat(chosen, fit)[:placed]
            in_last = placed - fit * (len(chosen) - 1)
            give_back(chosen[:-1], free - fit * length)
            give_back(chosen[-1:], free - in_last * length)
            same = same[placed:]
    return row_of
