"""MoE models on meshes: the gradients, losses and norms of one process, with any recomputation and compilation."""

import pytest

from tests.distributed.mixtures import MARGIN, VARIANTS, assert_as_on_one_process, config_of_cell, reference
from tests.distributed.scenarios import degrees_of
from tests.repetitions import in_turn, slow_but

FLAVORS = ("plain", "shared", "grouped", "three", "gpt_oss")
MESHES = ("one process", "shard 2", "tp 2", "shard 2 x tp 2", "replicate 2 x shard 2", "context 2", "context 2 x tp 2")
# test_cover.py has the other routers; `make test-all` has each mesh and variant with a router that chooses three experts, and
# with experts that have biases.
CELLS = [
    ("three", "replicate 2 x shard 2", "accumulated"),
    ("gpt_oss", "shard 2 x tp 2", "compiled, recomputed per operation"),
    ("gpt_oss", "context 2 x tp 2", "plain"),
]
OTHERS = [cell for cell in in_turn(FLAVORS, MESHES, VARIANTS) if cell[0] in ("three", "gpt_oss") and cell not in CELLS]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_routing_in_these_runs_does_not_depend_on_rounding_and_all_parameters_learn(pools, flavor):
    found, margin = reference(pools[1], flavor)
    print(f"{flavor}: margin {margin:.1e}")
    assert margin > MARGIN
    assert found.losses[-1] < 0.999 * found.losses[0]
    assert all(gradient.norm() > 1e-6 for gradient in found.gradients.values())
    experts = found.gradients["layers.0.ffn.experts.w2"].flatten(1).norm(dim=1)
    assert (experts > 0).all()


@pytest.mark.parametrize(("flavor", "mesh", "variant"), CELLS, ids=map(", ".join, CELLS))
def test_a_mixture_has_the_gradients_of_one_process_on_every_mesh(pools, flavor, mesh, variant):
    assert_as_on_one_process(pools, flavor, mesh, config_of_cell(flavor, degrees_of(mesh), variant))


@pytest.mark.slow
@pytest.mark.parametrize(("flavor", "mesh", "variant"), OTHERS, ids=map(", ".join, OTHERS))
def test_other_routers_equal_one_process_on_every_mesh(pools, flavor, mesh, variant):
    assert_as_on_one_process(pools, flavor, mesh, config_of_cell(flavor, degrees_of(mesh), variant))


@pytest.mark.parametrize("mesh", slow_but(["context 2"], ["context 2", "context 2 x tp 2"]))
def test_sinks_follow_their_heads_where_heads_are_exchanged(pools, mesh):
    method = {"context_parallel_degree": 2, "context_parallel_method": "ulysses"}
    assert_as_on_one_process(pools, "gpt_oss", mesh, config_of_cell("gpt_oss", degrees_of(mesh), "plain", parallelism=method))
