"""The comparison behind verify, check-model and replay: every difference is named, and rounding is not one."""

import math

import pytest
import torch

from titanlite.config.schema import Config
from titanlite.verify.compare import Trajectory, compare, on_mesh, relative_difference


def trajectory(**changes: object) -> Trajectory:
    weights = {"embed.weight": torch.ones(4), "head.weight": torch.arange(4.0)}
    gradients = {name: weight + 1 for name, weight in weights.items()}
    batches = [torch.arange(6), torch.arange(6) + 6]
    return Trajectory(weights, batches, [4.0, 3.0], [2.0, 1.0], gradients, {torch.float32}, {})._replace(**changes)


def named(**changes: object) -> list[tuple[str, str]]:
    """(quantity, location) of the differences beyond rounding between a changed trajectory and the plain one."""
    comparison = compare(trajectory(**changes), trajectory())
    assert comparison.equal == (not comparison.excessive)
    return [(difference.quantity, difference.where) for difference in comparison.excessive]


def test_weights_and_batches_are_compared_exactly_and_all_differences_are_named():
    assert named() == []
    weights = {"embed.weight": torch.ones(4), "head.weight": torch.nextafter(torch.arange(4.0), torch.tensor(9.0))}
    assert named(weights=weights) == [("weights", "head.weight")]
    assert named(batches=[torch.arange(6), torch.arange(6)]) == [("batches", "step 2")]


def test_every_gradient_beyond_rounding_is_named_with_the_worst():
    gradients = {"embed.weight": torch.full((4,), 2.002), "head.weight": torch.arange(4.0) * 1.5 + 1}
    comparison = compare(trajectory(gradients=gradients), trajectory())
    assert [difference.where for difference in comparison.excessive] == ["embed.weight", "head.weight"]
    assert str(comparison.excessive[0]) == "the gradient of embed.weight differs by 1.0e-03 of its norm"
    assert comparison.worst("gradients").where == "head.weight"
    gradients = {name: gradient * (1 + 1e-6) for name, gradient in trajectory().gradients.items()}
    assert named(gradients=gradients) == []


def test_a_gradient_that_only_one_of_the_two_has_differs():
    gradients = {"head.weight": torch.arange(4.0) + 1}
    assert named(gradients=gradients) == [("gradients", "embed.weight")]
    assert [d.where for d in compare(trajectory(), trajectory(gradients=gradients)).excessive] == ["embed.weight"]


def test_the_first_gradient_norm_has_less_tolerance_than_later_ones():
    assert named(norms=[2.0, 1.0001]) == []
    assert named(norms=[2.0001, 1.0]) == [("norms", "step 1")]
    assert named(norms=[2.0, 1.01], losses=[4.0, 3.001]) == [("losses", "step 2"), ("norms", "step 2")]


@pytest.mark.parametrize(
    ("value", "reference", "size"),
    [(1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.1, 1.0, 0.1), (1.0, 0.0, math.inf), (math.nan, 1.0, math.inf), (1.0, None, math.inf)],
)
def test_relative_differences(value, reference, size):
    assert relative_difference(value, reference) == pytest.approx(size)


def test_another_mesh_keeps_the_global_batch():
    config = Config.model_validate(
        {"training": {"local_batch_size": 4}, "parallelism": {"reduce_every_microbatch": False, "fsdp_prefetch": 2}}
    )
    split = on_mesh(config, {"dp_replicate": 2, "dp_shard": 3, "tp": 2}, 12).model_dump()
    assert (split["training"]["global_batch_size"], split["training"]["local_batch_size"]) == (12, 2)
    keys = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "fsdp_prefetch")
    assert [split["parallelism"][key] for key in keys] == [2, 3, 2, 2]
    assert split["parallelism"]["reduce_every_microbatch"], "without accumulation the key has no effect"
    alone = on_mesh(config, {}, 12)
    assert (alone.training.local_batch_size, alone.parallelism.reduce_every_microbatch) == (4, False)


@pytest.mark.parametrize(("ranks", "node"), [(8, 4), (4, 1), (6, 1), (1, 1)])
def test_another_mesh_keeps_the_size_of_a_node_where_experts_are_on_several(ranks, node):
    config = Config.model_validate({"parallelism": {"expert_parallel_degree": 16, "expert_parallel_node_size": 4}})
    assert on_mesh(config, {"dp_shard": ranks, "ep": ranks}, 24).parallelism.expert_parallel_node_size == node


@pytest.mark.parametrize(
    ("schedule", "stages", "before", "batch", "local"),
    [
        *(("1F1B", stages, 2, 6, local) for stages, local in [(1, 2), (2, 2), (3, 2), (4, 1), (6, 1)]),
        ("1F1B", 2, 6, 9, 3),  # 9 sequences in equal microbatches
        ("LoopedBFS", 2, 8, 8, 8),  # it takes one microbatch, which replay cut in two
        ("Interleaved1F1B", 2, 2, 10, 1),  # it does not take 5
    ],
)
def test_a_pipeline_keeps_the_local_batch_unless_its_schedule_needs_more_microbatches(schedule, stages, before, batch, local):
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    config = Config.model_validate({"training": {"local_batch_size": before}, "parallelism": parallelism})
    assert on_mesh(config, {"pp": stages}, batch).training.local_batch_size == local
