"""Mixtures of experts on meshes: the gradients, losses and norms of one process, whatever is recomputed or compiled.

Experts are a choice, which rounding can change where two scores are almost equal. So the smallest margin of all choices is
asserted too: rounding must be far below it.
"""

import functools
import math
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from models.moe import Router
from tests.distributed.pool import Pool
from tests.distributed.scenarios import GRAPHS, MODES, config_of, trajectory
from titanlite.config.schema import Config
from titanlite.tools.compare import Trajectory, compare

HERE = "tests.distributed.test_moe"
STEPS = 3
MARGIN = 5e-6  # between the scores of the last chosen and the first other expert; rounding changes scores by less than 1e-6
FLAVORS = ("plain", "shared", "grouped", "three")
MESHES: dict[str, dict[str, int]] = {
    "one process": {},
    "shard 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "replicate 2 x shard 2": {"dp_replicate": 2, "dp_shard": 2},
    "context 2": {"cp": 2},
    "context 2 x tp 2": {"cp": 2, "tp": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpoint": MODES["full"]},
    "recomputed per operation": {"activation_checkpoint": MODES["per operation"]},
    "compiled": {"compile": {"enable": True, "backend": "aot_eager"}},
    "compiled, recomputed per operation": {
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": MODES["per operation"],
    },
    "accumulated": {},
}
# Each mesh, each variant and each router in the cheap cells; `make test-all` has the product.
CELLS = [
    ("plain", "one process", "recomputed"),
    ("grouped", "one process", "compiled"),
    ("grouped", "shard 2", "plain"),
    ("plain", "shard 2", "compiled, recomputed per operation"),
    ("shared", "tp 2", "recomputed per operation"),
    ("plain", "tp 2", "accumulated"),
    ("shared", "shard 2 x tp 2", "compiled"),
    ("plain", "replicate 2 x shard 2", "accumulated"),
    ("three", "shard 2", "recomputed"),
    ("three", "replicate 2 x shard 2", "accumulated"),
    ("three", "shard 2 x tp 2", "plain"),
    ("grouped", "context 2", "recomputed per operation"),
    ("shared", "context 2 x tp 2", "recomputed"),
]
EVERY = [(flavor, mesh, variant) for flavor in FLAVORS for mesh in MESHES for variant in VARIANTS]
OTHERS = [cell for cell in EVERY if cell not in CELLS and cell[1:] != ("one process", "plain")]


def config_of_cell(flavor: str, mesh: str, variant: str) -> Config:
    sections: dict[str, dict[str, Any]] = {"model": {"name": "tests.tiny_moe"}, "training": {"steps": STEPS}}
    return config_of(MESHES[mesh], flavor, 2 if variant == "accumulated" else 1, **sections, **VARIANTS[variant])


def with_margin(degrees: dict[str, int], config: Config) -> tuple[Trajectory, float]:
    """What one process does, and the smallest margin of a choice in all its steps."""
    margins: list[float] = []
    choose = Router.choose

    def watched(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        margins.append(margin_of(router, scores))
        return chosen

    with mock.patch.object(Router, "choose", watched):
        found = trajectory(degrees, config)
    assert found is not None
    return found[0], min(margins)


def margin_of(router: Router, scores: Tensor) -> float:
    """The smallest difference between a score that decides and the next one, of experts and of groups."""
    smallest = []
    if router.groups > 1:
        of_groups = scores.unflatten(1, (router.groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(router.top_groups + 1, dim=-1).values
        smallest.append((best[:, -2] - best[:, -1]).min().item())
        worst = best[:, -2:-1]
        inside = (of_groups >= worst).repeat_interleave(scores.shape[1] // router.groups, dim=1)
        scores = scores.masked_fill(~inside, -1.0)
    best = scores.topk(router.top_k + 1, dim=-1).values
    return min([*smallest, (best[:, -2] - best[:, -1]).min().item()])


@pytest.fixture(scope="module")
def references(pools):
    return functools.cache(functools.partial(reference, pools[1]))


def reference(pool: Pool, flavor: str) -> tuple[Trajectory, float]:
    config = config_of_cell(flavor, "one process", "plain")
    return pool.run(f"{HERE}:with_margin", degrees={}, config=config)[0]


def assert_as_on_one_process(pools, references, flavor: str, mesh: str, variant: str) -> None:
    degrees, config = MESHES[mesh], config_of_cell(flavor, mesh, variant)
    ranks = math.prod(degrees.values())
    found, graphs = pools[ranks].run("tests.distributed.scenarios:trajectory", timeout=300, degrees=degrees, config=config)[0]
    comparison = compare(found, references(flavor)[0])
    print(f"{flavor}, {mesh}, {variant}: {comparison}")
    assert [str(each) for each in comparison.excessive] == []
    assert graphs == (GRAPHS if config.compile.enable else 0)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_choices_of_these_runs_do_not_depend_on_rounding_and_all_parameters_learn(references, flavor):
    found, margin = references(flavor)
    print(f"{flavor}: margin {margin:.1e}")
    assert margin > MARGIN
    assert found.losses[-1] < 0.999 * found.losses[0]
    assert all(gradient.norm() > 1e-6 for gradient in found.gradients.values())
    experts = found.gradients["layers.0.ffn.experts.w2"].flatten(1).norm(dim=1)
    assert (experts > 0).all()


@pytest.mark.parametrize(("flavor", "mesh", "variant"), CELLS, ids=map(", ".join, CELLS))
def test_a_mixture_has_the_gradients_of_one_process_on_every_mesh(pools, references, flavor, mesh, variant):
    assert_as_on_one_process(pools, references, flavor, mesh, variant)


@pytest.mark.slow
@pytest.mark.parametrize(("flavor", "mesh", "variant"), OTHERS, ids=map(", ".join, OTHERS))
def test_all_other_combinations_too(pools, references, flavor, mesh, variant):
    assert_as_on_one_process(pools, references, flavor, mesh, variant)
