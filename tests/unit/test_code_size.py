"""Lines of code are counted without comments, blank lines and docstrings, by package."""

import pytest

from benchmarks.code_size import code_lines


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
