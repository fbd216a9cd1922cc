"""The published runs that predictions are compared with are complete and consistent."""

from benchmarks.published import FILE, doubts, read


def test_every_run_has_a_source_and_consistent_results():
    for row in read(FILE.read_text(encoding="utf-8")):
        repository, _, page = row.table.name.partition(":")
        assert page and (repository == "arXiv" or (repository.count("/") == 1 and row.table.commit)), row.table.name
        assert not doubts(row), f"{row.table.name}: {doubts(row)}"
