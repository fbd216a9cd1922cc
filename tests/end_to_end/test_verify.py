"""titanlite verify: a correct model is equal on every mesh, and the wrong parameter of another is named."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.forked import Done, prepare, titanlite
from tests.end_to_end.test_check_model import line_of


def verify(folder: Path, name: str, *words: str, flavor: str = "large") -> Done:
    return titanlite("verify", "run.toml", *words, folder=prepare(folder, name, flavor))


def test_a_sound_model_is_equal_on_every_mesh(tmp_path):
    ended = verify(tmp_path, "tests.tiny", "--mesh", "1", "--mesh", "tp=2", "--steps", "2")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "equal within float32 rounding"
    assert any(line.startswith("tp=2") and "equal     equal" in line for line in ended.out.splitlines())


@pytest.mark.slow
def test_every_mesh_is_compared_by_default_and_noise_is_measured(tmp_path):
    ended = verify(tmp_path, "tests.forks.cancelling", "--steps", "1")
    assert ended.code == 0, ended.err
    assert "rounding alone changes the gradient of " in ended.out
    rows = [line.partition(" ")[0] for line in ended.out.splitlines()]
    assert [row for row in rows if "=" in row] == ["dp_shard=2,tp=2", "tp=2", "dp_shard=2", "dp_replicate=2", "cp=2", "pp=2"]


def test_a_wrong_sharding_table_is_reported_by_the_parameter(tmp_path):
    ended = verify(tmp_path, "tests.forks.wrong_style", "--mesh", "1", "--mesh", "tp=2", "--steps", "1")
    assert ended.code == 1, ended.err
    row = next(line for line in ended.out.splitlines() if line.startswith("tp=2"))
    assert "attention.head_scale.weight  <- not equal" in row
    assert ended.out.splitlines()[-1] == "NOT equal"


def test_an_error_of_the_model_is_one_line_with_mesh_file_line_and_module(tmp_path):
    ended = verify(tmp_path, "tests.forks.mixed_tensors", "--mesh", "1", "--mesh", "tp=2", "--steps", "1")
    (line,) = ended.err.splitlines()
    assert ended.code == 2
    place = line_of("mixed_tensors", "        return x * self.weight")
    assert re.match(rf"mesh tp=2: rank [01] of 2, .*: {re.escape(place)}, layers\.0\.factor: RuntimeError: ", line)
    assert "use local_weight(parameter)" in line
