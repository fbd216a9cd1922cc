"""From token files to rows of a batch: which tokens a row holds, under each `document_policy`.

A row has seq_len + 1 tokens: the inputs and, shifted by one, the labels. Under every policy it consists of pieces, each a run
of tokens of one file; the rest is padding. A row never extends from one file into the next.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titanlite.data.indexed import TokenFile
from titanlite.data.packing import Packing
from titanlite.errors import UserError

Piece = tuple[int, int]  # (first token in the file, tokens)


@dataclass(frozen=True)
class Rows:
    """The rows of one token file."""

    file: TokenFile
    count: int
    tokens: int  # in all rows, repeated ones included
    packing: Packing | None
    pieces: Callable[["Rows", int, int], list[Piece]]  # (rows, row, seq_len)


def count_packed(file: TokenFile, seq_len: int, packing: Packing | None) -> tuple[int, int]:
    """(rows, tokens in them): the documents one after another, cut every seq_len tokens. Neighbours share one token."""
    rows = max(0, (file.tokens - 1) // seq_len)
    return rows, rows * seq_len


def packed(rows: Rows, row: int, seq_len: int) -> list[Piece]:
    return [(row * seq_len, seq_len + 1)]


def packed_by_document(rows: Rows, row: int, seq_len: int) -> list[Piece]:
    """As `packed`, cut where documents begin."""
    first, last = row * seq_len, (row + 1) * seq_len
    cuts = rows.file.boundaries(rows.file.document_at(first) + 1, rows.file.document_at(last)).tolist()
    if cuts and not (first < cuts[0] and cuts[-1] <= last):
        raise UserError(f"{rows.file.prefix}.idx: the documents at token {first} do not follow each other")
    edges = [first, *cuts, last + 1]
    return [(a, b - a) for a, b in itertools.pairwise(edges) if b > a]  # documents may be empty


def count_best_fit(file: TokenFile, seq_len: int, packing: Packing | None) -> tuple[int, int]:
    assert packing is not None
    return packing.rows, packing.kept


def best_fit(rows: Rows, row: int, seq_len: int) -> list[Piece]:
    assert rows.packing is not None
    return rows.packing.pieces(row)


def count_truncated(file: TokenFile, seq_len: int, packing: Packing | None) -> tuple[int, int]:
    """(rows, tokens in them): one row per document."""
    step = 2**22
    parts = (file.boundaries(at, min(at + step, file.documents)) for at in range(0, file.documents, step))
    return file.documents, sum(int(np.minimum(np.diff(part), seq_len + 1).sum()) for part in parts)


def truncated(rows: Rows, row: int, seq_len: int) -> list[Piece]:
    first, end = rows.file.boundaries(row, row + 1).tolist()
    return [(first, min(end - first, seq_len + 1))] if end > first else []


@dataclass(frozen=True)
class Policy:
    """A `document_policy`."""

    count: Callable[[TokenFile, int, Packing | None], tuple[int, int]]  # rows of a file, tokens in them
    pieces: Callable[[Rows, int, int], list[Piece]]
    pieces_by_document: Callable[[Rows, int, int], list[Piece]]  # no piece spans two documents


POLICIES = {
    "pack": Policy(count_packed, packed, packed_by_document),
    "best_fit": Policy(count_best_fit, best_fit, best_fit),
    "truncate": Policy(count_truncated, truncated, truncated),
}


def rows_of(file: TokenFile, policy: str, seq_len: int, mask: bool, packing: Packing | None) -> Rows:
    """The rows of a file under a policy; mask: attention stays inside documents. packing: for "best_fit"."""
    chosen = POLICIES[policy]
    count, tokens = chosen.count(file, seq_len, packing)
    return Rows(file, count, tokens, packing, chosen.pieces_by_document if mask else chosen.pieces)


class Arrays(NamedTuple):
    """A `Batch` that is being filled: arrays of (rows, seq_len + 1), `documents` of (rows, seq_len)."""

    tokens: np.ndarray  # int64
    counted: np.ndarray | None  # bool, True for labels
    documents: np.ndarray | None  # int32, rising along the row; padding has a number of its own


def fill(batch: Arrays, at: int, rows: Rows, row: int, seq_len: int) -> None:
    """Copies one row of a file into row `at` of a batch that is all padding: tokens 0, counted False, documents 0."""
    tokens, ids, place, number = batch.tokens[at], rows.file.ids, 0, 0
    for number, (first, length) in enumerate(rows.pieces(rows, row, seq_len), 1):
        end = place + length
        tokens[place:end] = ids[first : first + length]
        if batch.counted is not None:
            loss = rows.file.loss
            batch.counted[at, place:end] = True if loss is None else loss[first : first + length]
        if batch.documents is not None:
            batch.documents[at, place:end] = number
            if batch.counted is not None:
                batch.counted[at, place] = False
        place = end
    if batch.documents is not None:
        batch.documents[at, place:] = number + 1
