"""MoE models on meshes: the gradients, losses and norms of one process, with any recomputation and compilation."""

import pytest

from tests.distributed.mixtures import MARGIN, assert_as_on_one_process, config_of_cell, reference
from tests.distributed.scenarios import degrees_of

FLAVORS = ("plain", "shared", "grouped", "three", "gpt_oss")
# test_cover.py has the other routers.
CELLS = [
    ("three", "shard 2", "accumulated"),
    ("gpt_oss", "context 2", "plain"),
]
OTHERS = [
    ("gpt_oss", "shard 2 x tp 2", "compiled, recomputed per operation"),
    ("three", "context 2 x tp 2", "recomputed per operation"),
    ("gpt_oss", "replicate 2 x shard 2", "accumulated"),
]
COMPILED = [("three", "context 2", "compiled"), ("gpt_oss", "context 2 x tp 2", "compiled")]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_routing_in_these_runs_does_not_depend_on_rounding_and_all_parameters_learn(pools, flavor):
    found, margin = reference(pools[1], flavor)
    print(f"{flavor}: margin {margin:.1e}")
    assert margin > MARGIN
    assert found.losses[-1] < 0.999 * found.losses[0]
    assert all(gradient.norm() > 1e-6 for gradient in found.gradients.values())
    experts = found.gradients["layers.0.ffn.experts.w2"].flatten(1).norm(dim=1)
    assert (experts > 0).all()


@pytest.mark.parametrize(
    ("flavor", "mesh", "variant"),
    [
        *CELLS,
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in OTHERS),
        *(pytest.param(*cell, marks=pytest.mark.campaign) for cell in COMPILED),
    ],
)
def test_a_mixture_has_the_gradients_of_one_process_on_every_mesh(pools, flavor, mesh, variant):
    assert_as_on_one_process(pools, flavor, mesh, config_of_cell(flavor, degrees_of(mesh), variant))


def test_sinks_follow_their_heads_where_heads_are_exchanged(pools):
    mesh = "context 2"
    method = {"context_parallel_degree": 2, "context_parallel_method": "ulysses"}
    assert_as_on_one_process(pools, "gpt_oss", mesh, config_of_cell("gpt_oss", degrees_of(mesh), "plain", parallelism=method))
