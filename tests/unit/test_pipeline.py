"""Where a model is split, what a simulated schedule predicts, and which pipelines are refused."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiny
from tests.distributed.scenarios import config_of
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.parallel.pipeline import STAGES_OF_A_RANK, assign_stages, balanced, split_layers, unsplittable
from titanlite.parallel.pipeline import faults as pipeline_faults
from titanlite.plan.pipeline import orders, rehearse
from titanlite.plan.shape import Shape
from titanlite.plan.step import simulated_ranks
from titanlite.registry.family import family_of, load_family
from titanlite.transforms.meta import on_meta
from titanlite.verify.compare import replaced


def pipelined(ranks: int, schedule: str = "1F1B", microbatches: int = 8, layers: int = 8, **keys: Any) -> Config:
    parallelism = {"pipeline_parallel_degree": ranks, "pipeline_parallel_schedule": schedule, **keys}
    batch = {"global_batch_size": microbatches, "local_batch_size": 1}
    return config_of({}, "plain", model={"overrides": {"n_layers": layers}}, parallelism=parallelism, training=batch)


def test_the_longest_part_is_as_short_as_possible():
    numbers = random.Random(0)
    for _ in range(60):
        costs = [numbers.uniform(0.5, 3.0) for _ in range(numbers.randint(2, 8))]
        parts, extra = numbers.randint(1, len(costs)), numbers.uniform(0, 4)
        sizes = balanced(costs, parts, extra)
        assert sum(sizes) == len(costs)
        assert min(sizes) >= 1

        def longest(ends: tuple[int, ...], costs: list[float] = costs, extra: float = extra) -> float:
            bounds = [0, *ends, len(costs)]
            sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(bounds)]
            return max(*sums[:-1], sums[-1] + extra, 0.0)

        best = min(longest(ends) for ends in itertools.combinations(range(1, len(costs)), parts - 1))
        assert longest(tuple(itertools.accumulate(sizes))[:-1]) == pytest.approx(best)


def test_a_large_head_leaves_fewer_blocks_to_the_last_stage():
    family = family_of(pipelined(2).model)
    for vocabulary, expected in ((16, [4, 4]), (2**10, [5, 3])):
        config = pipelined(2)
        config.model.overrides["vocab_size"] = vocabulary
        family = family_of(config.model)
        assert [len(stage) for stage in split_layers(config, family, on_meta(family, config))] == expected


@pytest.mark.parametrize(("schedule", "flavor"), [("1F1B", "plain"), ("LoopedBFS", "tied"), ("Interleaved1F1B", "tied")])
def test_every_tensor_but_a_tied_one_is_on_one_rank(schedule, flavor):
    config = pipelined(2, schedule)
    family = family_of(config.model.model_copy(update={"flavor": flavor}))
    model = on_meta(family, config)
    for name, _ in model.named_parameters():
        holders = [share.has(name) for share in assign_stages(config, family, model)]
        assert sum(holders) == (2 if flavor == "tied" and name == "embed.weight" else 1), name


def test_an_embedding_of_a_forks_own_class_needs_no_weight():
    """`check`, `plan` and every run stopped at a factored embedding with an AttributeError."""
    config = pipelined(2, layers=2)
    family = family_of(config.model.model_copy(update={"name": "tests.forks.own_names"}))
    assert [share.tied for share in assign_stages(config, family, on_meta(family, config))] == [False, False]
    assert Shape.of(family, family.on_meta(), 16).embeddings == 512 * 32 + 32 * 64 + 512 * 64


def test_parameters_that_two_stages_would_train_apart_are_refused():
    family = load_family("tests.forks.tied_in_constructor", "plain")
    assert unsplittable(family, 2).startswith("head shares embed.table.weight, which several ranks would train apart")
    assert unsplittable(load_family("tests.forks.tied_by_itself", "plain"), 2) == ""


def test_a_tied_embedding_with_more_than_its_weight_is_refused(monkeypatch):
    """The last stage would have kept an untrained copy of the rest, and saved it."""

    class Model(tiny.Model):
        def __init__(self, config: tiny.Config):
            super().__init__(config)
            self.embed.gain = nn.Parameter(torch.empty(config.dim))

    monkeypatch.setattr(tiny, "Model", Model)
    assert unsplittable(load_family("tests.tiny", "tied"), 2).startswith("the last stage would have embed.gain beside the tied")
    assert unsplittable(load_family("tests.tiny", "plain"), 2) == ""


@pytest.mark.parametrize(
    "schedule, ranks, microbatches",
    [("GPipe", 4, 6), ("1F1B", 4, 8), ("Interleaved1F1B", 4, 8), ("LoopedBFS", 2, 4)],
)
def test_the_bubble_of_equal_stages_has_its_closed_form(schedule, ranks, microbatches):
    """(p - 1) / (v m + p - 1) for p ranks with v stages each and m microbatches (Narayanan et al., arXiv:2104.04473, 2.2)."""
    several = STAGES_OF_A_RANK[schedule]
    with simulated_ranks(ranks):
        order = orders(schedule, ranks, microbatches, several * ranks)
    stages = several * ranks
    idle = rehearse(order, [1.0] * stages, [2.0] * stages).bubble
    assert idle == pytest.approx((ranks - 1) / (several * microbatches + ranks - 1))


VALIDATION = {"enable": True, "dataset_path": "held_out.txt", "sample_prompts": ["a"]}


@pytest.mark.parametrize(
    "config, message",
    [
        (pipelined(2, microbatches=1), "pipeline_parallel_degree = 2: needs at least 2 microbatches a step"),
        (pipelined(4, "Interleaved1F1B", 11), "11 microbatches a step"),
        (pipelined(4, "Interleaved1F1B", layers=6), "6 blocks are fewer than 8 stages"),
        (
            replaced(pipelined(2), lora={"enable": True, "modules": ["layers.[4-7].attention.*"]}),
            "leave nothing to train in stage",
        ),
        (replaced(pipelined(2), validation=VALIDATION), "set it to [], and use titanlite generate"),
        (pipelined(2, fsdp_reshard_after_forward="always"), "a pipeline keeps what it has gathered"),
    ],
)
def test_an_impossible_pipeline_is_refused_before_a_process_starts(config, message, tmp_path):
    config = replaced(config, job={"dump_folder": str(tmp_path / "out")})
    with pytest.raises(UserError) as caught:
        check(config, "run.toml", config.parallelism.pipeline_parallel_degree, open_files=False)
    assert message in str(caught.value)


def test_offloading_is_refused():
    """By the check's own function, since the key has no effect on a machine without a GPU."""
    config = pipelined(2, cpu_offload=True)
    family = family_of(config.model)
    (fault,) = pipeline_faults(config, family, on_meta(family, config))
    assert "parallelism.pipeline_parallel_degree = 2 with parallelism.cpu_offload = true: it is not supported" in fault


def test_a_schedule_that_deadlocks_is_found():
    with simulated_ranks(2):
        order = orders("GPipe", 2, 4, 2)
    order[1] = [order[1][-1], *order[1][:-1]]  # the last backward pass first
    with pytest.raises(UserError, match="the schedule deadlocks"):
        rehearse(order, [1.0, 1.0], [2.0, 2.0])
