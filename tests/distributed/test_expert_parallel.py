"""Expert parallelism: the gradients, losses and norms of one process, for any split of experts and any dispatch."""

from unittest import mock

import pytest

from models.moe import experts_of
from tests.distributed.mixtures import COMPILED, assert_as_on_one_process, config_of_cell
from tests.distributed.scenarios import MODES, degrees_of, mesh_of, trajectory
from titanlite.config.schema import Config
from titanlite.parallel import fsdp
from titanlite.parallel.expert import apply_expert_parallel
from titanlite.registry.family import load_family
from titanlite.verify.compare import Trajectory

# test_cover.py combines more features, but has no experts with biases.
CELLS = [
    ("plain", "shard 2, ep 2", "plain"),
    ("shared", "replicate 2 x shard 2, ep 2", "accumulated"),
    ("gpt_oss", "tp 2, ep 2", "recomputed"),
]
OTHERS = [
    ("gpt_oss", "shard 4, ep 4", "accumulated"),
    ("gpt_oss", "replicate 2 x shard 2, ep 2", "recomputed per operation"),
    ("gpt_oss", "context 2 x tp 2, ep 4", "compiled, recomputed per operation"),
]
# The share of the average rows that a rank receives at a time, so that these runs need several chunks.
SEVERAL_ROUNDS = {"max_tokens_factor": 0.3}


@pytest.mark.parametrize(
    ("flavor", "mesh", "variant"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in OTHERS)]
)
def test_split_experts_have_the_gradients_of_one_process(pools, flavor, mesh, variant):
    assert_as_on_one_process(pools, flavor, mesh, config_of_cell(flavor, degrees_of(mesh), variant))


def test_dispatching_in_several_chunks_changes_nothing(pools):
    mesh = "shard 2, ep 2"
    config = config_of_cell("plain", degrees_of(mesh), "plain", moe=SEVERAL_ROUNDS)
    assert_as_on_one_process(pools, "plain", mesh, config)


@pytest.mark.slow
def test_tokens_that_are_sent_once_to_each_node_change_nothing(pools):
    """Two nodes of two ranks, in several chunks, of which the backward pass recomputes some, in a compiled block."""
    mesh, nodes = "shard 4, ep 4", {"expert_parallel_node_size": 2}
    reduced = {"compile": COMPILED, "activation_checkpoint": MODES["full"]}
    config = config_of_cell("gpt_oss", degrees_of(mesh), "plain", moe=SEVERAL_ROUNDS, parallelism=nodes, **reduced)
    assert config.parallelism.expert_parallel_degree == 4
    assert_as_on_one_process(pools, "gpt_oss", mesh, config)


def ties_of_split_experts(degrees: dict[str, int], config: Config) -> list[bool]:
    """Whether w1 and w3 of each layer's experts, one parameter before, are one after the split."""
    model = load_family(config.model.name, config.model.flavor).on_meta()
    for experts in experts_of(model):
        experts.w3 = experts.w1
    apply_expert_parallel(model, config, mesh_of(degrees))
    return [experts.w3 is experts.w1 for experts in experts_of(model)]


def test_tied_parameters_of_split_experts_stay_one(pools):
    degrees = degrees_of("shard 2, ep 2")
    config = config_of_cell("plain", degrees, "plain")
    found = pools[2].run("tests.distributed.test_expert_parallel:ties_of_split_experts", degrees=degrees, config=config)
    assert all(all(ties) and ties for ties in found)


def units_inside_of_blocks(degrees: dict[str, int], config: Config) -> tuple[Trajectory, int] | None:
    """Trains as with PyTorch 2.11, whose FSDP2 has one mesh for all parameters of a unit."""
    with mock.patch.object(fsdp, "BEFORE_2_13", True):
        return trajectory(degrees, config)


def test_split_experts_without_a_mesh_for_each_parameter_equal_one_process(pools):
    flavor, mesh, variant = "shared", "replicate 2 x shard 2, ep 2", "accumulated"
    config = config_of_cell(flavor, degrees_of(mesh), variant)
    function = "tests.distributed.test_expert_parallel:units_inside_of_blocks"
    assert_as_on_one_process(pools, flavor, mesh, config, function)
