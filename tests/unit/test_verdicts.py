"""No assertion depends on seconds or on the last bit, as far as one line shows it; `make campaign PART=processors` finds the
rest.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FORBIDDEN = {
    r"assert .*\b(monotonic|perf_counter|time\.time)\(.*<=? *\d": "a limit in seconds: wait with tests/waiting.py",
    r"assert .*!= 0(\.0)?\)\.all\(\)": "a difference in every value: compare with what rounding explains",
    r"mark\.(alone|flaky)": "a test that needs an idle machine or luck",
}


@pytest.mark.parametrize("pattern", FORBIDDEN, ids=FORBIDDEN.values())
def test_no_assertion_depends_on_chance(pattern):
    found = [
        f"{path.relative_to(TESTS)}:{number}: {line.strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], FORBIDDEN[pattern]
