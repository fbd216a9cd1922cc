"""Best-fit packing: combines whole documents into rows with as little padding as possible.

Best-fit decreasing: the longest piece first, each into the fullest row that has room for it (Ding et al., "Fewer truncations
improve language modeling", arXiv:2404.10830). A document longer than a row is cut. Its parts share one token: the last label of
a part is the first input of the next, so that no label is lost.
"""

from pathlib import Path

import numpy as np

from titanlite.data.indexed import TokenFile
from titanlite.data.prepare.sums import write_sums


def pack_file(prefix: Path, seq_len: int, target: Path) -> None:
    """Packs the documents of a token file into rows of seq_len + 1 tokens, and writes them to `target`, an .npy file.

    The file is one array of int64. Header: rows, pieces, tokens of all pieces. Tables: the first piece of each row and at
    the end the number of pieces; the first token of each piece; the tokens of each piece.
    """
    file = TokenFile(prefix)
    starts, lengths = _cut(file.boundaries(0, file.documents), seq_len)
    row_of = best_fit(lengths, seq_len + 1)  # the longest pieces first
    # Validation reads the first rows, which must be as all others are. This generator of NumPy is the one that never changes.
    row_of = np.random.RandomState(0).permutation(row_of.max(initial=-1) + 1)[row_of]
    order = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of)
    header = np.array([len(counts), len(lengths), lengths.sum()])
    np.save(target, np.concatenate([header, [0], np.cumsum(counts), starts[order], lengths[order]]).astype(np.int64))
    write_sums(target)


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
