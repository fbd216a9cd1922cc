"""titanlite verify: a sound model is equal on every mesh, and of a wrong one the parameter is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOML = """
[model]
name = "{name}"
flavor = "{flavor}"
[training]
dataset = "{data}"
seq_len = 32
local_batch_size = 4
[lr_scheduler]
warmup_steps = 2
"""


def verify(folder: Path, name: str, *words: str, flavor: str = "large") -> subprocess.CompletedProcess[str]:
    (folder / "data.txt").write_text("".join(f"Line {i} says {i * i}.\n" for i in range(300)))
    (folder / "run.toml").write_text(TOML.format(name=name, flavor=flavor, data=folder / "data.txt"))
    return subprocess.run(
        [sys.executable, "-m", "titanlite", "verify", str(folder / "run.toml"), *words],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_sound_model_is_equal_on_every_mesh(tmp_path):
    ended = verify(
        tmp_path, "tests.tiny", "--mesh", "1", "--mesh", "dp_shard=2,tp=2", "--steps", "3", "--compile.enable", "false"
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "equal within float32 rounding"
    assert any(line.startswith("dp_shard=2,tp=2") and "equal     equal" in line for line in ended.stdout.splitlines())


def test_of_a_wrong_sharding_table_the_parameter_is_named(tmp_path):
    ended = verify(tmp_path, "tests.forks.wrong_style", "--mesh", "1", "--mesh", "tp=2", "--steps", "1")
    print(ended.stdout)
    assert ended.returncode == 1, ended.stderr
    row = next(line for line in ended.stdout.splitlines() if line.startswith("tp=2"))
    assert "attention.head_scale.weight  <- not equal" in row
    assert ended.stdout.splitlines()[-1] == "NOT equal"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--mesh", "1"], "at least two meshes"),
        (["--mesh", "1", "--mesh", "tp=x"], '--mesh "tp=x"'),
        (["--mesh", "1", "--mesh", "pp=2"], '--mesh "pp=2"'),
        (["--mesh", "1", "--mesh", "tp=3"], "parallelism.tensor_parallel_degree = 3"),
        (["--mesh", "1", "--mesh", "tp=2", "--training.stesp", "3"], "training.stesp"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(tmp_path, words, fault):
    ended = verify(tmp_path, "tests.tiny", *words)
    assert ended.returncode == 2
    assert fault in ended.stderr
    assert "Traceback" not in ended.stderr
