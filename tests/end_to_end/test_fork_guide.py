"""docs/tutorials/fork.md is true: its commands run and its differences apply, in order, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """One fenced block of the page."""

    kind: str
    text: str


def blocks() -> list[Block]:
    text = (ROOT / "docs" / "tutorials" / "fork.md").read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def applied(difference: str, source: str) -> str:
    """The source with lines that begin with - replaced by those with +; the replaced text must occur exactly once."""
    lines = difference.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines), difference
    before, after = (["", *(line[1:] for line in lines if line[:1] != sign), ""] for sign in "+-")
    assert source.count("\n".join(before)) == 1, f"not once in models/mine.py:\n{difference}"
    return source.replace("\n".join(before), "\n".join(after))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("titanlite", "models", "train_configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_train.sh", tmp_path)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "titanlite"  # as in an environment with the package installed
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titanlite "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.slow
def test_the_guide_leads_to_a_fork_that_is_checked_trained_and_exported(copy):
    own = {"PATH": f"{copy}/bin:{os.environ['PATH']}", "PYTHONPATH": str(copy), "PYTHON": sys.executable}
    done = []
    for block in blocks():
        if block.kind == "diff":
            mine = copy / "models" / "mine.py"
            mine.write_text(applied(block.text, mine.read_text()))
            continue
        assert block.kind == "bash"
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=copy,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **own},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        print(block.text, ended.stdout, ended.stderr[-3000:], sep="\n")
        assert ended.returncode == 0
        done.append(ended.stdout)
    check = next(out for out in done if out.startswith("mine:")).splitlines()
    assert check[-1] == "all passed"
    rows = [line for line in check if line.startswith(("sharding", "FLOPs", "compile", "tp 2 ", "2 x 2"))]
    assert len(rows) == 6 and all(line[21:].startswith("passed ") for line in rows)
    mine = (copy / "models" / "mine.py").read_text()
    assert "HF" not in mine and all(name in mine for name in ("LayerNorm(", "GatedAttention(", "Scale("))
    exported = torch.load(copy / "mine.pt", weights_only=True)
    assert exported["layers.0.ffn_scale.weight"].shape == (256,)


def test_a_difference_that_does_not_fit_is_no_difference():
    assert applied(" a\n-b\n+c\n", "\na\nb\n") == "\na\nc\n"
    for source in ("\na\nc\n", "\na\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="not once"):
            applied("-b\n+c\n", source.replace("a\nc", "a\nd"))
