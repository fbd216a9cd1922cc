"""Float8 on every mesh: the losses and gradients of one process, with recomputation and compiled, and after a resume."""

from typing import Any

import pytest
import torch

from tests.distributed.scenarios import MODES, config_of
from tests.distributed.test_resume import losses, stored
from tests.distributed.test_resume import run as whole_run
from titanlite.tools.compare import Trajectory, compare

pytest.importorskip("torchao", reason="needs torchao")

GATHER = {"enable_fsdp_float8_all_gather": True}
SHARD, TP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "shard 2": (SHARD, {}),
    "tp 2": (TP, {}),
    "2 x 2": (BOTH, {}),
    "shard 2, rows": (SHARD, {"recipe_name": "rowwise"}),
    "tp 2, rows": (TP, {"recipe_name": "rowwise"}),
    "2 x 2, rows and whole gradients": (BOTH, {"recipe_name": "rowwise_with_gw_hp"}),
    "shard 2, float8 gather": (SHARD, GATHER),
    "shard 4, float8 gather": ({"dp_shard": 4}, GATHER),
    "hybrid, float8 gather": ({"dp_replicate": 2, "dp_shard": 2}, GATHER),
}


def run(pools, degrees: dict[str, int], keys: dict[str, Any], mode: str = "none", **sections: Any) -> Trajectory:
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    config = config_of(
        degrees,
        training={"steps": 3},
        float8={"enable": True, "emulate": True, **keys},
        activation_checkpoint=MODES[mode],
        **sections,
    )
    return pools[ranks].run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0][0]


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_gives_the_losses_and_gradients_of_one_process(pools, name):
    degrees, keys = CASES[name]
    result = compare(run(pools, degrees, keys), run(pools, {}, keys))
    assert result.equal, result.excessive
    assert result.worst("losses").size < 1e-6


def test_float8_is_not_float32(pools):
    config = config_of({}, training={"steps": 3})
    plain = pools[1].run("tests.distributed.scenarios:trajectory", degrees={}, config=config)[0][0]
    assert compare(run(pools, {}, {}), plain).worst("gradients").size > 1e-3


@pytest.mark.parametrize("mode", ["full", "per operation"])
def test_recomputation_gives_the_same_gradients(pools, mode):
    assert compare(run(pools, SHARD, {}, mode), run(pools, SHARD, {})).worst("gradients").size < 1e-6


def test_a_compiled_run_gives_the_same_gradients(pools):
    compiled = run(pools, SHARD, {}, compile={"enable": True, "backend": "aot_eager"})
    assert compare(compiled, run(pools, SHARD, {})).worst("gradients").size < 1e-5


@pytest.mark.parametrize("keys", [{}, GATHER], ids=["float8", "float8 gather"])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one_and_checkpoints_are_as_without_it(pools, tmp_path, keys):
    own = {"float8": {"enable": True, "emulate": True, **keys}}
    whole_run(pools, SHARD, tmp_path / "whole", 20, **own)
    for steps in (7, 20):
        whole_run(pools, SHARD, tmp_path / "parts", steps, **own)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected, found = stored(tmp_path / "whole", 20), stored(tmp_path / "parts", 20)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    whole_run(pools, SHARD, tmp_path / "plain", 7)
    plain = stored(tmp_path / "plain", 7)
    assert {name: (t.shape, t.dtype) for name, t in plain.items()} == {name: (t.shape, t.dtype) for name, t in found.items()}
    # a run without float8 goes on with it where that is allowed
    whole_run(pools, SHARD, tmp_path / "plain", 20, checkpoint={"allow_changes": ["float8.*"]}, **own)
    assert losses(tmp_path / "plain")[7:] != losses(tmp_path / "whole")[7:]
