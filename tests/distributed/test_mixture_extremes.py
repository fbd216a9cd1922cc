"""MoE models with few tokens, few or unused experts, NaNs, and other features: split experts train as on one process."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.moe import routers_of
from tests.distributed.mixtures import MARGIN, config_of_cell
from tests.distributed.scenarios import CPU, config_of, mesh_of, rank_batches
from titanlite.config.schema import Config
from titanlite.loop.step import forward_backward, update
from titanlite.optim.lr_schedule import build_schedule
from titanlite.parallel.mesh import ranks_of
from titanlite.transforms.shards import local_part
from titanlite.verify.compare import Trajectory, begin, compare, relative_difference

HERE = "tests.distributed.test_mixture_extremes"
SHARD, TP = {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}
Cell = tuple[dict[str, int], int, dict[str, Any], dict[str, Any]]


def few_tokens(length: int) -> dict[str, Any]:
    return {"training": {"seq_len": length}}


# mesh, microbatches on one data rank, overrides of the model, more sections
CELLS: dict[str, Cell] = {
    "most experts get no token of a step": (SHARD, 2, {"n_experts": 256}, few_tokens(4)),
    "one token on each rank": (TP, 8, {}, few_tokens(2)),
    "all experts for every token": (SHARD, 1, {"n_experts": 4, "top_k": 4}, {}),
    "one expert": ({"dp_shard": 2}, 1, {"n_experts": 1, "top_k": 1}, {}),
    "one row in each round": (SHARD, 4, {}, {"moe": {"max_tokens_factor": 0.01}, **few_tokens(6)}),
}


def config_of_extreme(cell: Cell, name: str = "AdamW") -> tuple[Config, Config]:
    """(on the mesh, on one process)."""
    degrees, accumulation, overrides, sections = cell
    own = {"model": {"name": "tests.tiny_moe", "overrides": overrides}, "optimizer": {"name": name, "lr": 5e-3}}
    if name == "Muon":
        own["optimizer"]["implementation"] = "for-loop"
    alone = {key: value for key, value in sections.items() if key != "moe"}  # without dispatch
    more = [{**each, "training": {"steps": 3, **each.get("training", {})}} for each in (sections, alone)]
    return config_of(degrees, "plain", accumulation, **own, **more[0]), config_of({}, "plain", 1, **own, **more[1])


def unused(found: Trajectory, name: str) -> torch.Tensor:
    """The experts of a stack that got no token in the first step."""
    return found.gradients[name].flatten(1).abs().amax(dim=1) == 0


def decays(config: Config, run: Trajectory, name: str) -> torch.Tensor:
    """Which values of a parameter have changed only by weight decay, by its formula, within one rounding per step."""
    schedule, steps, kept = build_schedule(config), range(1, config.training.steps + 1), 1.0
    for step in steps:
        kept *= 1 - schedule.at(step) * config.optimizer.weight_decay
    weights = run.weights[name].double()
    rounding = len(steps) * torch.finfo(torch.float32).eps * weights.abs()
    return (run.updates[name] - weights * (kept - 1)).abs() <= rounding


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        *((cell, "AdamW") for cell in CELLS),
        pytest.param("most experts get no token of a step", "Muon", marks=pytest.mark.slow),
    ],
)
def test_split_experts_train_as_on_one_process(pools, cell, name):
    config, alone = config_of_extreme(CELLS[cell], name)
    degrees = CELLS[cell][0]
    found = pools[ranks_of(degrees)].run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0][0]
    choice = "one expert" in cell or "all experts" in cell  # there is no choice
    function = "tests.distributed.scenarios:trajectory" if choice else "tests.distributed.mixtures:with_margin"
    expected, margin = pools[1].run(function, degrees={}, config=alone)[0]
    assert choice or margin > MARGIN, "choices depend on rounding"
    comparison = compare(found, expected)
    print(f"{cell}: {comparison}")
    assert [str(each) for each in comparison.excessive] == []
    stacks = [each for each in expected.gradients if ".experts." in each]
    assert all(torch.equal(unused(found, each), unused(expected, each)) for each in stacks)
    if "of a step" in cell:
        for each in stacks:
            idle = unused(expected, each)
            assert idle.float().mean() > 0.5
            for run in (found, expected):  # some of these experts get tokens later
                assert decays(config, run, each)[idle].float().mean() > 0.5


# --------------------------------------------------------------------------------------------------- what else a model has


OTHERS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "bfloat16 parameters and moments": (
        {
            "training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
            "optimizer": {"rounding": "compensated", "implementation": "for-loop"},  # other tests compile it
        },
        {"losses": 5e-3, "norms": 2e-2},
    ),
    "float8": ({"float8": {"enable": True, "emulate": True, "filter_fqns": []}}, {"losses": 1e-3, "norms": 1e-2}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_split_experts_in_other_precisions_have_the_losses_of_one_process(pools, other):
    sections, bounds = OTHERS[other]
    if other == "float8":
        pytest.importorskip("torchao", reason="needs torchao")
    runs = [
        pools[ranks_of(mesh)].run(
            "tests.distributed.scenarios:trajectory", degrees=mesh, config=config_of_cell("shared", mesh, "plain", **sections)
        )[0][0]
        for mesh in (SHARD, {})
    ]
    for quantity, bound in bounds.items():
        worst = max(map(relative_difference, getattr(runs[0], quantity), getattr(runs[1], quantity)))
        print(f"{other}: {quantity} differ by {worst:.1e}")
        assert worst < bound


# -------------------------------------------------------------------------------------------------------------- no number


def around_a_nan(degrees: dict[str, int], config: Config) -> tuple[list[float], bool, bool]:
    """Norms of three steps, in the second of which one rank's router is NaN; whether that step changed nothing on this rank,
    including router biases, and the third one did.
    """
    run, schedule = begin(config, mesh_of(degrees), CPU), build_schedule(config)
    norms, states = [], []

    def state() -> list[torch.Tensor]:
        biases = [router.bias for router in routers_of(run.model)]
        return [*(local_part(parameter).detach() for parameter in run.model.parameters()), *biases]

    for step, batch in zip(range(1, 4), rank_batches(config, run.mesh), strict=False):
        router, last = local_part(routers_of(run.model)[0].weight), dist.get_rank() == dist.get_world_size() - 1
        kept = router.detach().clone()
        if step == 2 and last:
            router.detach().fill_(math.nan)
        forward_backward(run.model, batch, run.mesh)
        router.detach().copy_(kept)
        states.append([tensor.clone() for tensor in state()])
        norms.append(update(run.model, run.optimizer, schedule.at(step), 1.0).item())
    same = [[torch.equal(*pair) for pair in zip(a, b, strict=True)] for a, b in pairwise([*states[1:], state()])]
    return norms, all(same[0]), not any(same[1])


def test_all_ranks_skip_a_step_in_which_one_rank_has_a_nan_router(pools):
    config = config_of_cell("shared", SHARD, "plain", moe={"bias_update_speed": 0.01})
    for norms, skipped, went_on in pools[2].run(f"{HERE}:around_a_nan", degrees=SHARD, config=config):
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]
        assert skipped and went_on
