"""Each planted fault has exactly one location in the tree, even if its function has moved, and their page is up to date."""

import ast

import pytest

from tests.mutations.faults import ROOT, read_faults, with_fault
from tests.mutations.score import DOCUMENT, document, read_score

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_has_one_place_in_the_tree_and_names_tests_that_exist(fault):
    _, changed = with_fault(ROOT, fault)
    ast.parse(changed)
    assert ast.dump(ast.parse(fault.after)) != ast.dump(ast.parse(fault.before))
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")


def test_at_least_forty_faults_of_other_frameworks_each_name_their_report():
    reported = [fault for fault in FAULTS if fault.source]
    assert len(reported) >= 40
    assert all(fault.source.startswith("https://github.com/") and fault.named and fault.model for fault in reported)
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


def test_the_page_of_the_proofs_has_the_tables_of_their_results():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text, FAULTS, read_score()), "run python -m tests.mutations.score --table"
