"""Loss curves: every run is a configuration that trains, and what is told of them is the mean of their last steps."""

import json

import pytest

from benchmarks import curves, report
from benchmarks.curves import LAST, REFERENCE, ROOT, RUNS
from titanlite.checks import check
from titanlite.config_file import read_config


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_a_configuration_without_faults(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "train_configs" / "llama_debug.toml"
    config = read_config(path, [word for key, value in RUNS[name].items() for word in (f"--{key}", value)])
    check(config, str(path), 1)


def test_the_table_holds_means_of_the_last_steps_and_their_distance_to_the_reference(tmp_path):
    one, other = [9.0] * LAST + [2.0] * LAST, [9.0] * LAST + [2.0] * (LAST // 2) + [3.0] * (LAST // 2)
    told = curves.table({REFERENCE: one, "other": other})
    assert told.splitlines()[2:] == [f"| {REFERENCE} | 2.0000 | +0.0000 |", "| other | 2.5000 | +0.5000 |"]
    (tmp_path / "results").mkdir()
    result = {"commit": "0123456789abcdef", "curves": {REFERENCE: one, "other": other}}
    (tmp_path / "results" / "curves.json").write_text(json.dumps(result))
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    assert report.main(["--folder", str(tmp_path)]) == 0
    assert told in (tmp_path / "README.md").read_text()
    assert (tmp_path / "results" / "curves.png").stat().st_size > 0
