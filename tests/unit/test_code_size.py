"""Lines of code are counted without comments, blank lines and docstrings, by package."""

import pytest

from benchmarks.code_size import code_lines, sizes, totals


@pytest.mark.parametrize(
    "source, lines",
    [
        ("", 0),
        ('"""One\ntwo."""\n\n# comment\nx = 1  # another\n', 1),
        ("x = '''one\ntwo'''\n", 2),
        ("class A:\n    '''Doc.'''\n\n    x: int = 0\n    '''What x is.'''\n", 2),
        ("def f(\n    a,\n\n    b,\n):\n    return (a,\n        # why\n        b)\n", 6),
    ],
)
def test_code_size_counts_lines_with_code(source, lines):
    assert code_lines(source) == lines


def test_packages_are_counted_apart_and_the_core_leaves_three_out(tmp_path):
    for file in (
        "train.py",
        "config/read.py",
        "data/order.py",
        "data/prepare/shards.py",
        "plan/step.py",
        "tools/a.py",
        "tools/b.py",
    ):
        (tmp_path / "titanlite" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "titanlite" / file).write_text("x = 1\ny = 2\n")
    lines, files = sizes(tmp_path)
    assert lines["titanlite/*.py"] == lines["titanlite/data"] == lines["titanlite/data/prepare"] == 2
    assert (lines["titanlite/tools"], files["titanlite/tools"]) == (4, 2)
    assert totals(lines) == (6, 14)
