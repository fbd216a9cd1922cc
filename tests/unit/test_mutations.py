"""Faults for the suite: all sixty are still there, each has one place in the tree, and the drawn ones are those of the draw."""

import subprocess

import pytest

from tests.mutations.draw import COMMIT, COUNT, SEED, draw
from tests.mutations.faults import read_faults, with_fault
from tests.mutations.run import HERE, ROOT, _read, results_table
from tests.mutations.score import DOCUMENT, SCORE, document, read_history

FAULTS = read_faults()
HISTORY = [past.fault for past in read_history()]


@pytest.mark.parametrize("fault", FAULTS + HISTORY, ids=lambda fault: fault.id)
def test_a_fault_stands_in_one_line_of_the_tree_and_names_tests_that_exist(fault):
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    changed = with_fault(source, fault)
    compile(changed, fault.file, "exec")
    assert sum(a != b for a, b in zip(source.split("\n"), changed.split("\n"), strict=True)) == 1
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(encoding="utf-8")


def test_at_least_forty_faults_of_other_frameworks_each_name_their_report():
    history = read_history()
    assert len(history) >= 40
    assert all(past.source.startswith("https://github.com/") and past.named for past in history)


def test_the_readme_has_the_table_of_the_faults_and_of_their_results():
    assert results_table(FAULTS, HERE / "after.json") in (HERE / "README.md").read_text(encoding="utf-8"), (
        "write the output of python -m tests.mutations.run --table into README.md"
    )


def test_none_of_the_drawn_faults_was_replaced():
    if subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"no commit {COMMIT} here")
    written = {(fault.id, fault.origin, fault.rewritten or fault.line) for fault in FAULTS if fault.kind != "chosen"}
    assert written == {(entry["id"], entry["origin"], entry["line"]) for entry in draw(COMMIT, SEED, COUNT)}
    assert len(FAULTS) - len(written) == 20


def test_the_page_of_the_proofs_has_the_tables_of_their_results():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text, read_history(), _read(SCORE)), "run python -m tests.mutations.score --table"
