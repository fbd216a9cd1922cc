"""The published runs that predictions are compared with are complete, and are split without looking at results."""

import pytest

from benchmarks.published import FILE, doubts, read
from titanlite.ground.errors import UserError

TEXT = FILE.read_text(encoding="utf-8")
FIRST = TEXT.index("rows = [\n")
ROWS = read(TEXT)


def planted(old, new):
    """The file with a fault in its first table that has `old`."""
    assert old in TEXT[FIRST:]
    return TEXT[:FIRST] + TEXT[FIRST:].replace(old, new, 1)


def test_there_are_enough_runs_on_both_sides_of_the_split():
    assert len(ROWS) >= 60
    fitted, blind = ({row.table.name for row in ROWS if row.table.split == split} for split in ("fitted", "blind"))
    assert len(fitted) >= 5 and len(blind) >= 5 and not fitted & blind
    assert all(row.table.split == "fitted" for row in ROWS if row.table.known)
    assert len({row.table.name for row in ROWS if row.table.known}) == 5, "the tables that were quoted"


def test_every_run_has_a_source_and_consistent_results():
    for row in ROWS:
        repository, _, page = row.table.name.partition(":")
        assert page and (repository == "arXiv" or (repository.count("/") == 1 and row.table.commit)), row.table.name
        assert not doubts(row), f"{row.table.name}: {doubts(row)}"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("peak_memory_gib = ", "peak_memory_gb = ", "peak_memory_gb"),
        ("recompute = ", "recomputed = ", "recompute"),
        ('precision = "bf16"', "precision = 16", "precision"),
        ("global_batch = 16\n", "global_batch = 15\n", "global_batch"),
        ("gpus = 8\n", "gpus = 16\n", "mesh"),
        ("known = true", "knwon = true", "knwon"),
        ("peak_memory_gib = 83.9", "peak_memory_gib = -83.9", "peak_memory_gib"),
        (", tflops_per_gpu = 430, mfu_percent = 43", "", "measurement"),
    ],
)
def test_a_fault_of_the_file_is_named(old, new, named):
    with pytest.raises(UserError, match=named):
        read(planted(old, new))


def test_contradicting_results_make_a_row_doubtful():
    twice = {"tokens_per_second = 10471": "tokens_per_second = 20942", "tflops_per_gpu = 250": "tflops_per_gpu = 500"}
    for old, new in twice.items():
        assert [row for row in read(planted(old, new)) if doubts(row)], new
