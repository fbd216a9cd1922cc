"""The balance of experts on meshes: counts and biases equal those of one process exactly, and gradients include the losses."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.moe import routers_of
from tests.distributed.mixtures import MARGIN
from tests.distributed.scenarios import CPU, MODES, config_of, degrees_of, mesh_of, rank_batches
from tests.repetitions import slow_but
from titanlite.config.schema import Config
from titanlite.optim.lr_schedule import build_schedule
from titanlite.parallel.mesh import ranks_of
from titanlite.verify.compare import begin, compare, follow

HERE = "tests.distributed.test_expert_balance"
STEPS = 4
MOE = {"bias_update_speed": 0.01, "balance_loss": 0.1, "router_z_loss": 0.01}
COMPILED = {"enable": True, "backend": "aot_eager"}
# (mesh, other sections, accumulation)
CELLS: dict[str, tuple[dict[str, int], dict[str, Any], int]] = {
    "shard 2 ep 2, recomputed": ({"dp_shard": 2, "ep": 2}, {"activation_checkpoint": MODES["full"]}, 1),
    "shard 2, compiled, per operation": (
        {"dp_shard": 2},
        {"compile": COMPILED, "activation_checkpoint": MODES["per operation"]},
        1,
    ),
    "context 2 x tp 2 ep 4, per operation": ({"cp": 2, "tp": 2, "ep": 4}, {"activation_checkpoint": MODES["per operation"]}, 1),
    "replicate 2 x shard 2 ep 2, accumulated": ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}, 2),
}


class Balanced(NamedTuple):
    counts: list[Tensor]  # of each step, of all routers, over all ranks
    biases: list[Tensor]  # after each step


def config_of_cell(degrees: dict[str, int], sections: dict[str, Any], accumulation: int) -> Config:
    base = {"model": {"name": "tests.tiny_moe"}, "training": {"steps": STEPS}, "moe": MOE}
    return config_of(degrees, "shared", accumulation, **base, **sections)


def balanced(degrees: dict[str, int], config: Config) -> Balanced:
    torch._dynamo.reset()
    run = begin(config, mesh_of(degrees), CPU)
    routers, counts, biases = routers_of(run.model), [], []
    for _ in follow(run, build_schedule(config), rank_batches(config, run.mesh), range(1, STEPS + 1)):
        biases.append(torch.stack([router.bias for router in routers]).clone())  # before this step's update
        counts.append(torch.stack([router.counts for router in routers]))
        dist.all_reduce(counts[-1])
    return Balanced(counts, biases)


@pytest.fixture(scope="module")
def expected(pools) -> Balanced:
    config = config_of_cell({}, {}, 1)
    return pools[1].run(f"{HERE}:balanced", degrees={}, config=config)[0]


@pytest.mark.parametrize("cell", slow_but(["shard 2 ep 2, recomputed", "shard 2, compiled, per operation"], CELLS))
def test_shares_and_biases_are_exactly_those_of_one_process(pools, expected, cell):
    degrees, sections, accumulation = CELLS[cell]
    config = config_of_cell(degrees, sections, accumulation)
    assert expected.counts[0].sum(1).unique().tolist() == [8 * 32 * 2] and expected.biases[-1].unique().numel() > 2
    for found in pools[ranks_of(degrees)].run(f"{HERE}:balanced", degrees=degrees, config=config):
        again = 2 if cell.endswith("per operation") and "compiled" not in cell else 1  # a recomputation that chooses again
        assert all(torch.equal(ours, again * theirs) for ours, theirs in zip(found.counts, expected.counts, strict=True))
        assert all(map(torch.equal, found.biases, expected.biases))


# slices of tokens divide the sequences of a microbatch
@pytest.mark.parametrize(
    ("mesh", "compiled"), [("tp 2", False), pytest.param("context 2 x tp 2", True, marks=pytest.mark.slow)]
)
def test_balance_losses_of_sequences_split_over_ranks_equal_one_process(pools, mesh, compiled):
    training = {"steps": STEPS, "global_batch_size": 3, "local_batch_size": 3}
    sections = {"model": {"name": "tests.tiny_moe"}, "training": training, "moe": {"balance_loss": 0.42}}
    config = config_of({}, "plain", **sections)
    expected, margin = pools[1].run("tests.distributed.mixtures:with_margin", degrees={}, config=config)[0]
    assert margin > MARGIN
    degrees = degrees_of(mesh)
    config = config_of(degrees, "plain", **sections, compile=COMPILED if compiled else {})
    pool = pools[ranks_of(degrees)]
    found, _ = pool.run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0]
    assert [str(each) for each in compare(found, expected).excessive] == []
