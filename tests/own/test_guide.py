"""docs/guides/own_parts.md is true: a run with each of its snippets is sound."""

import re
from pathlib import Path

import pytest

from titanlite.config.read import read_config
from titanlite.loop.checks import check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "own_parts.md").read_text(encoding="utf-8")
TOML = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", TOML, ids=[text.splitlines()[0] for text in TOML])
def test_a_run_with_the_keys_of_the_guide_passes_all_checks(text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'base = "{ROOT}/train_configs/llama_debug.toml"\n{text}')
    config = read_config(file, ["--job.dump_folder", str(tmp_path / "run")])
    assert check(config, str(file), 1, open_files=False) == []
