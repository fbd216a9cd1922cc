"""docs/guides/own_parts.md is true: a run with each of its snippets passes all checks."""

import re
import sys
from pathlib import Path

import pytest

from titanlite.config.read import read_config
from titanlite.data import own
from titanlite.loop.checks import check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "own_parts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TOML = [text for kind, text in BLOCKS if kind == "toml"]


@pytest.mark.parametrize("text", TOML, ids=[text.splitlines()[0] for text in TOML])
def test_a_run_with_the_keys_of_the_guide_passes_all_checks(text, tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text("".join(text for kind, text in BLOCKS if kind == "python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    file = tmp_path / "run.toml"
    file.write_text(f'base = "{ROOT}/train_configs/llama_debug.toml"\n{text}')
    config = read_config(file, ["--job.dump_folder", str(tmp_path / "run")])
    assert check(config, str(file), 1, open_files=False) == []
    assert list(own.faults(config, 4096)) == []


def test_the_guide_has_the_parts_that_the_tests_train_with():
    parts = (ROOT / "tests" / "own" / "parts.py").read_text(encoding="utf-8")
    assert [text for kind, text in BLOCKS if kind == "python" and text not in parts] == []
