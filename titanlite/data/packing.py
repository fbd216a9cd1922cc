"""Best-fit packing: whole documents put together into rows with as little padding as possible.

Best-fit decreasing, the longest piece first and each into the fullest row that has room for it (Ding et al., "Fewer
truncations improve language modeling", arXiv:2404.10830). A document longer than a row is cut; its parts share one token,
the last label of one is the first input of the next, so that no label is lost.
"""

from pathlib import Path

import numpy as np

from titanlite.data.indexed import TokenFile

_HEAD = 5  # numbers that stand before the tables


class Packing:
    """The rows of one token file, mapped from disk: which pieces of documents stand in each, one after the other."""

    def __init__(self, path: Path):
        """path: a file of `pack_file`. Raises ValueError for one that is not."""
        self.path = path
        table = np.load(path, mmap_mode="r").view(np.ndarray)
        if len(table) < _HEAD:
            raise ValueError("too short")
        # of: tokens and documents of the token file; kept: tokens of all rows together
        *of, self.rows, pieces, self.kept = (int(number) for number in table[:_HEAD])
        self.of = tuple(of)
        if len(table) != _HEAD + self.rows + 1 + 2 * pieces:
            raise ValueError(f"{len(table)} numbers, {self.rows} rows and {pieces} pieces")
        self._ends, self._starts, self._lengths = np.split(table[_HEAD:], [self.rows + 1, self.rows + 1 + pieces])

    def __reduce__(self):
        return Packing, (self.path,)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(first token in the file, tokens) of each piece of a row."""
        inside = slice(int(self._ends[row]), int(self._ends[row + 1]))
        return list(zip(self._starts[inside].tolist(), self._lengths[inside].tolist(), strict=True))


def pack_file(prefix: Path, seq_len: int, target: Path) -> None:
    """Packs the documents of a token file into rows of seq_len + 1 tokens; `target` becomes the .npy file of it.

    The file is one row of int64: tokens and documents of the token file, rows, pieces, tokens in them; the first piece of each
    row, and at the end their number; the first token of each piece; its tokens.
    """
    file = TokenFile(prefix)
    starts, lengths = _pieces(file.boundaries(0, file.documents), seq_len)
    row_of = best_fit(lengths, seq_len + 1)
    order = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of)
    head = np.array([file.tokens, file.documents, len(counts), len(lengths), lengths.sum()])
    with open(target, "wb") as out:
        np.save(out, np.concatenate([head, [0], np.cumsum(counts), starts[order], lengths[order]]).astype(np.int64))


def _pieces(boundaries: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the parts of seq_len + 1 tokens at most that documents are cut into.

    boundaries (documents + 1,) int64: where each begins and the last one ends. A document of a single token has no label
    and is left out.
    """
    labels = np.diff(boundaries) - 1
    parts = np.maximum(0, -(-labels // seq_len))
    document = np.repeat(np.arange(len(labels)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)  # of the part in its document
    return boundaries[document] + number * seq_len, np.minimum(labels[document] - number * seq_len, seq_len) + 1


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, (pieces,) int64, rows numbered from 0 without gaps; lengths (pieces,) are at most `capacity`.

    Pieces of one length are placed together, into all rows with the same room at once, so that it takes a few operations a
    length and not some a piece: a million pieces in a second.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    rows = 0
    room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # free tokens -> groups of rows that have so many
    some = np.zeros(capacity + 1, bool)  # where there are any

    def give_back(group: np.ndarray, free: int) -> None:
        if len(group):
            room[free].append(group)
            some[free] = True

    for same in np.split(by_length, np.flatnonzero(np.diff(lengths[by_length])) + 1):
        while len(same):
            length = int(lengths[same[0]])
            free = length + int(some[length:].argmax())
            if some[free]:
                chosen = room[free].pop()
                some[free] = bool(room[free])
            else:
                free, wanted = capacity, -(-len(same) // (capacity // length))
                chosen = np.arange(rows, rows + wanted)
                rows += wanted
            fit = free // length  # so many go into each row before another row becomes the fullest with room
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
