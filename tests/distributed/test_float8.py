"""Float8 on every mesh: the losses and gradients of one process, with recomputation and compiled, and after a resume."""

from typing import Any

import pytest
import torch

from tests.distributed.scenarios import config_of
from tests.distributed.test_resume import STEPS, losses, stored
from tests.distributed.test_resume import run as whole_run
from titanlite.verify.compare import Trajectory, compare

pytest.importorskip("torchao", reason="needs torchao")

GATHER = {"enable_fsdp_float8_all_gather": True}
SHARD, TP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "2 x 2": (BOTH, {}),
    "tp 2, rows": (TP, {"recipe_name": "rowwise"}),
    "2 x 2, rows and whole gradients": (BOTH, {"recipe_name": "rowwise_with_gw_hp"}),
    "shard 4, float8 gather": ({"dp_shard": 4}, GATHER),
    "hybrid, float8 gather": ({"dp_replicate": 2, "dp_shard": 2}, GATHER),
}


def run(pools, degrees: dict[str, int], keys: dict[str, Any]) -> Trajectory:
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    config = config_of(
        degrees,
        training={"steps": 3},
        float8={"enable": True, "emulate": True, **keys},
    )
    return pools[ranks].run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0][0]


# test_cover.py allows for a value that flips to the one beside it; here none does
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


@pytest.mark.parametrize("keys", [pytest.param({}, marks=pytest.mark.slow), GATHER], ids=["float8", "float8 gather"])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one_and_checkpoints_are_as_without_it(pools, tmp_path, keys):
    own = {"float8": {"enable": True, "emulate": True, **keys}}
    whole_run(pools, SHARD, tmp_path / "whole", STEPS, **own)
    for steps in (5, STEPS):
        whole_run(pools, SHARD, tmp_path / "parts", steps, **own)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected, found = stored(tmp_path / "whole", STEPS), stored(tmp_path / "parts", STEPS)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    whole_run(pools, SHARD, tmp_path / "plain", 5)
    plain = stored(tmp_path / "plain", 5)
    assert {name: (t.shape, t.dtype) for name, t in plain.items()} == {name: (t.shape, t.dtype) for name, t in found.items()}
    # a run without float8 goes on with it where that is allowed
    whole_run(pools, SHARD, tmp_path / "plain", STEPS, checkpoint={"allow_changes": ["float8.*"]}, **own)
    assert losses(tmp_path / "plain")[5:] != losses(tmp_path / "whole")[5:]
