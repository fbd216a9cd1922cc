"""Each planted fault has one place in the tree, wherever its function has moved to, and their page is up to date."""

import ast

import pytest

from tests.mutations.faults import ROOT, Fault, read_faults, with_fault
from tests.mutations.score import DOCUMENT, document, read_score

FAULTS = read_faults()
_BEFORE = "def add(a, b):\n    return a + b * 2  # é\n\n\ndef other(a, b):\n    return a + b * 2\n"
_FAULT = Fault("x", "add", "b*2", "b - 2", "", [])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_has_one_place_in_the_tree_and_names_tests_that_exist(fault):
    path, changed = with_fault(ROOT, fault)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(path.read_bytes()))
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")


def test_at_least_forty_faults_of_other_frameworks_each_name_their_report():
    reported = [fault for fault in FAULTS if fault.source]
    assert len(reported) >= 40
    assert all(fault.source.startswith("https://github.com/") and fault.named and fault.model for fault in reported)
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


@pytest.fixture
def tree(tmp_path):
    """A tree with one file of models/."""

    def write(source):
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / "one.py").write_text(source, encoding="utf-8")
        return tmp_path

    return write


def test_only_the_piece_of_the_named_function_changes(tree):
    _, changed = with_fault(tree(_BEFORE), _FAULT)
    assert changed == _BEFORE.replace("b * 2", "(b - 2)", 1)


def test_a_function_that_was_moved_into_a_class_and_formatted_has_the_same_fault(tree):
    body = "        'text'\n        é = (a\n             + b  # the second\n             * 2)\n        return é\n"
    moved = f"class Sum:\n    def add(a, b):\n{body}"
    _, changed = with_fault(tree(moved), _FAULT)
    assert "+ (b - 2))" in changed


def test_a_statement_becomes_several_with_their_indentation(tree):
    root = tree("def f(x):\n    if x:\n        x += (\n            1)\n    return x\n")
    _, changed = with_fault(root, Fault("x", "f", "x += 1", "if x > 1:\n  x -= 1\ny = x", "", []))
    assert changed == "def f(x):\n    if x:\n        if x > 1:\n            x -= 1\n        y = x\n    return x\n"


@pytest.mark.parametrize(
    ("function", "before", "message"),
    [
        ("absent", "b * 2", r"x \(why\) has lost its place: no function .* is named absent.*history\.json"),
        ("add", "b * 3", "models.one.add: 0 places have `b \\* 3`"),
        ("one.add", "b", "models.one.add: 2 places have `b`"),
    ],
)
def test_a_fault_without_one_place_says_what_to_do(tree, function, before, message):
    root = tree("def add(a, b):\n    return b + b * 2\n")
    with pytest.raises(LookupError, match=message):
        with_fault(root, Fault("x", function, before, "0", "why", []))


def test_the_page_of_the_proofs_has_the_tables_of_their_results():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text, FAULTS, read_score()), "run python -m tests.mutations.score --table"
