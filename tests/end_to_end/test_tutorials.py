"""docs/tutorials/ is true: every block of bash runs, in order, in a copy of the repository, and prints what the page shows; the
differences of fork.md apply.

Blocks of sh are for GPUs or need downloads; they do not run here. tests/unit/test_docs.py checks their options.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.launcher import ROOT
from tests.repetitions import campaign_but
from tests.waiting import PATIENCE

PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}


def lacking(shown: str, printed: str) -> list[str]:
    """The lines of a page's output that the printed output lacks, in order."""
    rest = iter([line.strip() for line in printed.splitlines()])
    return [line for line in shown.splitlines() if not any(line.strip() == found for found in rest)]


def applied(difference: str, source: str) -> str:
    """The source with lines that begin with - replaced by those with +; the replaced text must occur exactly once."""
    lines = difference.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines), difference
    before, after = (["", *(line[1:] for line in lines if line[:1] != sign), ""] for sign in "+-")
    assert source.count("\n".join(before)) == 1, f"not once in models/mine.py:\n{difference}"
    return source.replace("\n".join(before), "\n".join(after))


def play(page: Path, folder: Path) -> list[str]:
    """Follows a page in a copy of the repository; -> what each block of bash has printed."""
    for name in ("titanlite", "models", "train_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_train.sh", folder)
    (folder / "bin").mkdir()
    command = folder / "bin" / "titanlite"  # as in an environment with the package installed
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titanlite "$@"\n')
    command.chmod(0o755)
    own = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(folder), "PYTHON": sys.executable}
    printed = [""]
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        assert kind in ("bash", "sh", "text", "diff")
        if kind == "diff":
            mine = folder / "models" / "mine.py"
            mine.write_text(applied(text, mine.read_text()))
        if kind == "text":
            assert lacking(text, printed[-1]) == [], printed[-1]
        if kind != "bash":
            continue
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **own},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        print(text, ended.stdout, ended.stderr[-3000:], sep="\n")
        assert ended.returncode == 0
        printed.append(ended.stdout)
    assert len(printed) > 3
    return printed


@pytest.mark.timeout(1800)  # several starts, on a machine that may be busy
@pytest.mark.parametrize("page", campaign_but((), ["pretrain", "fork", "resume", "diagnose"], PAGES))
def test_a_tutorial_runs_as_it_is_written(page, tmp_path):
    printed = play(PAGES[page], tmp_path)
    if page != "fork":
        return
    check = next(out for out in printed if out.startswith("mine:")).splitlines()
    assert check[-1] == "all passed"
    rows = [line for line in check if line.startswith(("sharding", "FLOPs", "compile", "tp 2 ", "2 x 2"))]
    assert len(rows) == 6 and all(line[21:].startswith("passed ") for line in rows)
    exported = torch.load(tmp_path / "mine.pt", weights_only=True)
    assert exported["layers.0.ffn_scale.weight"].shape == (256,)


def test_output_that_differs_from_the_page_and_a_difference_that_does_not_fit_are_found():
    assert lacking("a\nc\n", "a\nb\nc\n") == []
    assert lacking("a\nd\n", "a\nb\nc\n") == ["d"]
    assert lacking("b\na\n", "a\nb\n") == ["a"]
    assert applied(" a\n-b\n+c\n", "\na\nb\n") == "\na\nc\n"
    for source in ("\na\nd\n", "\na\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="not once"):
            applied("-b\n+c\n", source)
