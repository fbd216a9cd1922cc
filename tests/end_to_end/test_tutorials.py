"""docs/tutorials/ is true: every block of bash runs, in order, in a copy of the repository, and prints what the page shows.

Blocks of sh are for GPUs or need downloads; they do not run here. tests/unit/test_docs.py checks their options.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_fork_guide import ROOT, copy  # noqa: F401
from tests.waiting import PATIENCE

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"), key=lambda path: path.name)
PAGES = [path for path in PAGES if path.stem != "fork"]  # it has diffs too: test_fork_guide.py


def lacking(shown: str, printed: str) -> list[str]:
    """The lines of a page's output that the printed output lacks, in order."""
    rest = iter([line.strip() for line in printed.splitlines()])
    return [line for line in shown.splitlines() if not any(line.strip() == found for found in rest)]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several starts, on a machine that may be busy
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_runs_as_it_is_written(page: Path, copy: Path):  # noqa: F811
    own = {"PATH": f"{copy}/bin:{os.environ['PATH']}", "PYTHONPATH": str(copy), "PYTHON": sys.executable}
    printed, ran = "", 0
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        assert kind in ("bash", "sh", "text")
        if kind == "text":
            assert lacking(text, printed) == [], printed
        if kind != "bash":
            continue
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=copy,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **own},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        print(text, ended.stdout, ended.stderr[-3000:], sep="\n")
        assert ended.returncode == 0
        printed, ran = ended.stdout, ran + 1
    assert ran > 2


def test_output_that_differs_from_the_page_is_found():
    assert lacking("a\nc\n", "a\nb\nc\n") == []
    assert lacking("a\nd\n", "a\nb\nc\n") == ["d"]
    assert lacking("b\na\n", "a\nb\n") == ["a"]
