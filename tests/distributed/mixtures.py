"""Cells of MoE models: runs on a mesh, compared with one process.

Rounding can change which experts are chosen if two scores are almost equal. So the smallest margin of the reference's routing
is computed too: rounding must be far below it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from models.moe import Router
from tests.distributed.pool import Pool
from tests.distributed.scenarios import GRAPHS, MODES, config_of, degrees_of, trajectory
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.parallel import expert
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import family_of
from titanlite.verify.compare import Trajectory, compare

# (model.name, model.flavor) by the names in cells; other names are flavors of tests.tiny_moe
MODELS = {"gpt_oss": ("tests.tiny_gpt_oss", "plain")}
STEPS = 3
MARGIN = 5e-6  # between the scores of the last chosen and the next expert; rounding changes scores by less than 1e-6
COMPILED = {"enable": True, "backend": "aot_eager"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpoint": MODES["full"]},
    "recomputed per operation": {"activation_checkpoint": MODES["per operation"]},
    "compiled": {"compile": COMPILED},
    "compiled, recomputed per operation": {"compile": COMPILED, "activation_checkpoint": MODES["per operation"]},
    "accumulated": {},
}


def config_of_cell(flavor: str, degrees: dict[str, int], variant: str, **more: dict[str, Any]) -> Config:
    name, flavor = MODELS.get(flavor, ("tests.tiny_moe", flavor))
    sections: dict[str, dict[str, Any]] = {"model": {"name": name}, "training": {"steps": STEPS}}
    for section, keys in (VARIANTS[variant] | more).items():
        sections[section] = {**sections.get(section, {}), **keys}
    return config_of(degrees, flavor, 2 if variant == "accumulated" else 1, **sections)


@contextlib.contextmanager
def watched_margins() -> Iterator[list[float]]:
    """Records the smallest margin of each routing decision in this process."""
    margins: list[float] = []
    choose = Router.choose

    def watched(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        margins.append(margin_of(router, scores))
        return chosen

    with mock.patch.object(Router, "choose", watched):
        yield margins


def with_margin(degrees: dict[str, int], config: Config) -> tuple[Trajectory, float]:
    """The results of one process, and the smallest routing margin in all its steps."""
    with watched_margins() as margins:
        found = trajectory(degrees, config)
    assert found is not None
    return found[0], min(margins)


def margin_of(router: Router, scores: Tensor) -> float:
    """The smallest difference between the last chosen score and the next one, of experts and of groups."""
    smallest = []
    if router.bias is not None:
        scores = scores + router.bias
    if router.groups > 1:
        of_groups = scores.unflatten(1, (router.groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(router.top_groups + 1, dim=-1).values
        smallest.append((best[:, -2] - best[:, -1]).min().item())
        worst = best[:, -2:-1]
        inside = (of_groups >= worst).repeat_interleave(scores.shape[1] // router.groups, dim=1)
        scores = scores.masked_fill(~inside, -1.0)
    best = scores.topk(router.top_k + 1, dim=-1).values
    return min([*smallest, (best[:, -2] - best[:, -1]).min().item()])


@functools.cache
def reference(pool: Pool, flavor: str) -> tuple[Trajectory, float]:
    """A plain run on one process, and its smallest routing margin."""
    config = config_of_cell(flavor, {}, "plain")
    return pool.run(f"{__name__}:with_margin", degrees={}, config=config)[0]


def skip_without_2_13(config: Config) -> None:
    """Skips a test whose experts PyTorch 2.11 cannot split; fails for any other fault."""
    for fault in expert.faults(config, family_of(config.model).on_meta()):
        assert BEFORE_2_13 and "needs PyTorch 2.13" in fault
        pytest.skip(fault)


def assert_as_on_one_process(
    pools: dict[int, Pool],
    flavor: str,
    mesh: str,
    config: Config,
    function: str = "tests.distributed.scenarios:trajectory",
) -> None:
    skip_without_2_13(config)
    degrees = degrees_of(mesh)
    found, graphs = pools[ranks_of(degrees)].run(function, degrees=degrees, config=config)[0]
    comparison = compare(found, reference(pools[1], flavor)[0])
    print(f"{flavor}, {mesh}: {comparison}")
    assert [str(each) for each in comparison.excessive] == []
    local_and_global = flavor == "gpt_oss"  # only local layers have a mask
    assert graphs == (GRAPHS + local_and_global if config.compile.enable else 0)
