"""Float8 on every mesh: the losses and gradients of one process. test_variants.py resumes."""

from typing import Any

import pytest

from tests.distributed.scenarios import config_of
from titanlite.parallel.mesh import ranks_of
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
    config = config_of(degrees, training={"steps": 3}, float8={"enable": True, "emulate": True, **keys})
    return pools[ranks_of(degrees)].run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0][0]


# test_cover.py allows for a value that flips to the one beside it; here none does
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_gives_the_losses_and_gradients_of_one_process(pools, name):
    degrees, keys = CASES[name]
    result = compare(run(pools, degrees, keys), run(pools, {}, keys))
    assert result.equal, result.excessive
    assert result.worst("losses").size < 1e-6
