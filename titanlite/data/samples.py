"""From token files to rows of a batch: which tokens a row holds, under each `document_policy`.

A row has seq_len + 1 tokens: the inputs and, shifted by one, the labels. Under every policy it consists of pieces, each a run
of tokens of one file; the rest is padding. A row never extends from one file into the next.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from titanlite.data.blocks import Array, BlockFile
from titanlite.data.indexed import TokenFile
from titanlite.data.packing import Packing

Piece = tuple[int, int]  # (first token in the file, tokens)


@dataclass(frozen=True)
class Rows:
    """The rows of one token file. Can be pickled."""

    file: TokenFile
    count: int
    tokens: int  # in all rows, repeated ones included
    pieces: Callable[[int], list[Piece]]  # of a row
    stored: list[BlockFile]  # what they are read from


def rows_of(file: TokenFile, seq_len: int, policy: str, mask: bool, packing: Packing | None) -> Rows:
    """The rows of a file under a `document_policy`. mask: no piece spans two documents. packing: for "best_fit"."""
    if packing is not None:
        return Rows(file, packing.rows, packing.kept, packing.pieces, [*file.files, packing.stored])
    if policy == "truncate":
        return Rows(file, file.documents, _truncated_tokens(file, seq_len), partial(_truncated, file, seq_len), file.files)
    count = max(0, (file.tokens - 1) // seq_len)  # documents one after another; neighboring rows share one token
    return Rows(file, count, count * seq_len, partial(_packed_by_document if mask else _packed, file, seq_len), file.files)


def _packed(_file: TokenFile, seq_len: int, row: int) -> list[Piece]:
    return [(row * seq_len, seq_len + 1)]


def _packed_by_document(file: TokenFile, seq_len: int, row: int) -> list[Piece]:
    """As `_packed`, cut where documents begin."""
    first, last = row * seq_len, (row + 1) * seq_len
    _, begins = file.documents_of(first, last)
    edges = [first, *begins[1:-1], last + 1]
    return [(a, b - a) for a, b in itertools.pairwise(edges) if b > a]  # documents may be empty


def _truncated(file: TokenFile, seq_len: int, row: int) -> list[Piece]:
    first, end = file.boundaries(row, row + 1).tolist()
    return [(first, min(end - first, seq_len + 1))] if end > first else []


def _truncated_tokens(file: TokenFile, seq_len: int) -> int:
    """The tokens in all rows, with one document in each row."""
    step = 2**22
    parts = (file.boundaries(at, min(at + step, file.documents)) for at in range(0, file.documents, step))
    return sum(int(np.minimum(np.diff(part), seq_len + 1).sum()) for part in parts)


class Row(NamedTuple):
    """What one row of a batch consists of, read from token files or made by data of the user's own."""

    pieces: list[Piece]  # of `ids`; the documents of a row that the user's own data has made
    ids: np.ndarray | Array  # (n,) of an integer type
    loss: np.ndarray | Array | None  # (n,), true where a token is a label; None: all are


NOTHING = Row([], np.empty(0, np.int64), None)  # all of it is padding


class Arrays(NamedTuple):
    """A `Batch` that is being filled: arrays of (rows, seq_len + 1), `documents` of (rows, seq_len)."""

    tokens: np.ndarray  # int64
    counted: np.ndarray | None  # bool, True for labels
    documents: np.ndarray | None  # int32, rising along the row; padding has a number of its own


def fill(batch: Arrays, at: int, row: Row) -> None:
    """Writes all of row `at` of a batch: its pieces, then padding, with token 0 and no labels."""
    start, number = 0, 0
    pieces, ids, loss = row
    tokens, counted, documents = (None if array is None else array[at] for array in batch)
    assert tokens is not None
    for number, (first, length) in enumerate(pieces, 1):
        end = start + length
        tokens[start:end] = ids[first : first + length]
        if counted is not None:
            counted[start:end] = True if loss is None else loss[first : first + length]
        if documents is not None:
            documents[start:end] = number
            if counted is not None:
                counted[start] = False
        start = end
    if documents is not None:
        documents[start:] = number + 1
    if start < len(tokens):
        tokens[start:] = 0
        if counted is not None:
            counted[start:] = False
