"""Very large models are built, sharded and partly initialised on one machine, for ranks that do not exist."""

import pytest

from titanlite.config import Config
from titanlite.tools.estimate import estimate


@pytest.mark.parametrize(
    ("flavor", "ranks", "tensor", "parameters"),
    [("8b", 8, 1, 8_030_261_248), ("70b", 64, 8, 70_553_706_496), ("405b", 512, 8, 405_853_388_800)],
)
def test_rank_zero_builds_shards_and_initialises_its_part_of_a_layer_within_seconds(flavor, ranks, tensor, parameters):
    config = Config.model_validate({"model": {"flavor": flavor}, "parallelism": {"tensor_parallel_degree": tensor}})
    found = estimate(config, ranks)
    print(f"{flavor} on {ranks}: {found}, whole model in {found.initialize_seconds:.0f} s")
    assert found.parameters == parameters
    assert found.local_values == pytest.approx(parameters / ranks, rel=0.001)
    assert found.layer_values < parameters / ranks / 25
    assert found.build_seconds + found.shard_seconds + found.layer_seconds < 30
