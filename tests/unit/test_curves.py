"""Loss curves: every run is a configuration that trains, and what is reported of them is the mean of their last steps."""

import json
import os
import subprocess
import sys

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


_PRODUCTS = """
import sys, torch
torch.manual_seed(0)
wide = [torch.randn(2, 3, 40, 40) for _ in range(2)]
exact = [a.half().double() @ b.half().double() for a, b in wide]  # before any kernel is replaced
from titanlite.loop.checks import check
from titanlite.config.read import read_config
check(read_config(sys.argv[1], sys.argv[2:]), sys.argv[1], 1)
for (a, b), product in zip(wide, exact):
    for one, two, expected in ((a.half(), b.half(), product), (a[0].half(), b[0].half(), product[0])):
        into = torch.empty_like(expected, dtype=torch.float16)
        torch.matmul(one, two, out=into)
        for found in (one @ two, into):
            error = (found.double() - expected).abs() / expected.abs().clamp(min=0.1)
            assert found.dtype == torch.float16 and error.max() < 2**-11 * 1.05, error.max()
try:
    torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()
except ValueError:
    print("as wanted")
"""


def test_the_float16_run_is_sound_and_its_products_are_exact_but_for_one_rounding(tmp_path):
    words = [word for key, value in RUNS[_REPLACES].items() for word in (f"--{key}", value)]
    command = [sys.executable, "-c", _PRODUCTS, ROOT / "train_configs" / "llama_debug.toml", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "as wanted\n"), ended.stderr


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


def test_too_few_steps_are_refused_before_anything_is_trained_or_written(monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "RESULT", tmp_path / "curves.json")
    monkeypatch.setattr(curves.sys, "argv", ["curves", "--steps", str(LAST - 1), "--runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match="--steps 49: must be at least 50"):
        curves.main()
    assert list(tmp_path.iterdir()) == []
