"""Loss curves: every run is a configuration that trains, and what is reported of them is the mean of their last steps."""

import json

import pytest

from benchmarks import curves, report
from benchmarks.curves import LAST, REFERENCE, ROOT, RUNS
from titanlite.config.read import read_config
from titanlite.loop.checks import check

# its model replaces kernels of the process that imports it; see below
_REPLACES = "AdamW, float16"


@pytest.mark.parametrize("name", [name for name in RUNS if name != _REPLACES])
def test_every_run_is_a_configuration_without_faults(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "train_configs" / "llama_debug.toml"
    config = read_config(path, [word for key, value in RUNS[name].items() for word in (f"--{key}", value)])
    check(config, str(path), 1)


def test_the_table_holds_means_of_the_last_steps_and_their_distance_to_the_reference(tmp_path):
    one, other = [9.0] * LAST + [2.0] * LAST, [9.0] * LAST + [2.0] * (LAST // 2) + [3.0] * (LAST // 2)
    table = curves.table({REFERENCE: one, "other": other})
    assert table.splitlines()[2:] == [f"| {REFERENCE} | 2.0000 | +0.0000 |", "| other | 2.5000 | +0.5000 |"]
    (tmp_path / "results").mkdir()
    result = {"commit": "0123456789abcdef", "curves": {REFERENCE: one, "other": other}}
    (tmp_path / "results" / "curves.json").write_text(json.dumps(result))
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    assert report.main(["--folder", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert table in page
    assert f"Not run yet: {'; '.join(name for name in RUNS if name != REFERENCE)}." in page
    assert (tmp_path / "results" / "curves.png").stat().st_size > 0
