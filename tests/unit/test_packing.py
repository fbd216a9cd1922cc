"""Best-fit packing: as good as best-fit decreasing, and no label is lost or in two rows."""

import time

import numpy as np
import pytest

from tests.token_files import write_file
from titanlite.config.schema import Source, Training
from titanlite.data.prepare import cache as packed_once
from titanlite.data.prepare.cache import open_packing
from titanlite.data.prepare.packing import best_fit
from titanlite.data.sources import TokenSource
from titanlite.ground.files import cache_folder

_SEEDS = range(6)
pytestmark = pytest.mark.usefixtures("cache")


def _naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Free positions of each row, by the definition: each piece, the longest first, into the row in which it leaves the least
    room.
    """
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(free) if room >= length]
        if fitting:
            free[min(fitting, key=free.__getitem__)] -= length
        else:
            free.append(capacity - length)
    return free


def _random_lengths(seed: int) -> tuple[np.ndarray, int]:
    """Pieces of two to `capacity` tokens, at times few different lengths and at times most of them short."""
    random = np.random.default_rng(seed)
    capacity = int(random.integers(2, 70))
    most = int(random.integers(2, capacity + 1)) if seed % 2 else capacity
    return random.integers(2, most + 1, random.integers(1, 400)), capacity


# ----------------------------------------------------------------------------------------------------------- algorithm


@pytest.mark.parametrize("seed", _SEEDS)
def test_rows_are_as_full_as_those_of_naive_best_fit_decreasing(seed):
    lengths, capacity = _random_lengths(seed)
    row_of = best_fit(lengths, capacity)
    used = np.bincount(row_of, lengths).astype(int)
    assert sorted((capacity - used).tolist()) == sorted(_naive_best_fit(lengths.tolist(), capacity))
    assert used.min() > 0  # numbered without gaps


def test_a_million_pieces_take_a_few_seconds_at_most():
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 10**6).astype(np.int64).clip(2, 4097)
    began = time.process_time()
    rows = best_fit(lengths, 4097).max() + 1
    assert time.process_time() - began < 5
    assert rows * 4097 < 1.001 * lengths.sum()


# ------------------------------------------------------------------------------------------------------------ packed once


def _rows(packing) -> list[list[tuple[int, int]]]:
    return [packing.pieces(row) for row in range(packing.rows)]


def test_rows_are_packed_once_for_each_length(tmp_path, monkeypatch):
    file = write_file(tmp_path / "a", [list(range(n)) for n in (5, 4, 3, 7, 12)])
    first = {length: _rows(open_packing(file, "f", length)) for length in (6, 8)}
    assert first[6] != first[8]
    monkeypatch.setattr(packed_once, "pack_file", None)
    assert {length: _rows(open_packing(file, "f", length)) for length in (6, 8)} == first


def test_the_first_rows_are_a_sample_of_all(tmp_path):
    """Validation reads them, and best-fit places the longest pieces first."""
    file = write_file(tmp_path / "a", [[1] * n for n in [9] * 100 + [3] * 300])
    rows = _rows(open_packing(file, "f", 8))
    assert len(rows) == 200
    assert 30 < sum(len(row) == 1 for row in rows[:100]) < 70


def test_rows_of_other_content_are_packed_again(tmp_path):
    for contents, lengths in (("f", [5, 4, 3]), ("g", [4, 4, 4])):
        rows = _rows(open_packing(write_file(tmp_path / "a", [[1] * n for n in lengths]), contents, 8))
        assert sorted(length for row in rows for _, length in row) == sorted(lengths)


def test_a_file_that_gets_the_name_of_another_keeps_its_rows(tmp_path):
    """Their tokens and documents are as many, so that nothing else would show it."""
    training, contents = Training(seq_len=8, document_policy="best_fit"), [[5, 4], [3, 6]]
    for names in ("ab", "bc"):
        files = [write_file(tmp_path / name, [[1] * n for n in each]) for name, each in zip(names, contents, strict=True)]
        rows = TokenSource(Source(path="x"), "x", files, "f").with_rows(training, "key").rows
        found = [sorted(length for row in range(part.count) for _, length in part.pieces(row)) for part in rows]
        assert found == [sorted(each) for each in contents]


def test_damaged_rows_in_the_cache_are_packed_again(tmp_path):
    file = write_file(tmp_path / "a", [[1] * 5, [1] * 4])
    open_packing(file, "f", 8)
    [kept] = cache_folder().glob("*/rows.npy")
    kept.write_bytes(kept.read_bytes()[:-8])
    assert _rows(open_packing(file, "f", 8)) == [[(0, 5), (5, 4)]]
