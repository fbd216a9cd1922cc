"""A pipeline's stages: the same weights, batches, losses, norms and gradients as on one process; checkpoints of any mesh."""

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.block_graphs import EXPLICIT, drawn
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import CPU, MODES, config_of, learnable_data, mesh_of, rank_batches, trajectory
from tests.distributed.test_resume import STEPS, Degrees, losses, run, stored
from tests.repetitions import slow_but
from titanlite.config.schema import Config
from titanlite.loop.step import begin_training, forward_backward
from titanlite.loop.validation import validate
from titanlite.parallel import pipeline as pipeline_module
from titanlite.parallel.late_stage import LateStage
from titanlite.parallel.mesh import ranks_of
from titanlite.parallel.pipeline import STAGES_OF_A_RANK, Pipeline, Stage
from titanlite.plan.pipeline import Action, orders
from titanlite.plan.predict import predict
from titanlite.plan.step import pretended_ranks
from titanlite.registry.family import family_of
from titanlite.verify.compare import DEGREES, Comparison, Trajectory, compare, replaced

HERE = "tests.distributed.test_pipeline"
TWO, FOUR = {"pp": 2}, {"pp": 4}
SHARD, TP = {"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}
FULL, OPERATIONS = ({"activation_checkpoint": MODES[mode]} for mode in ("full", "per operation"))
INTERLEAVED, FLAT, BFS = (
    {"parallelism": {"pipeline_parallel_schedule": name}} for name in ("Interleaved1F1B", "GPipe", "LoopedBFS")
)
ZERO_BUBBLE = {"parallelism": {"pipeline_parallel_schedule": "InterleavedZeroBubble"}}
FOUR_TIED = {"model": {"flavor": "tied", "overrides": {"n_layers": 4}}}
MIXTURE = {
    "model": {"name": "tests.tiny_moe", "flavor": "shared", "overrides": {"n_layers": 4}},
    "moe": {"balance_loss": 0.01, "bias_update_speed": 0.01},
}
THREE_EACH = {
    "model": {"overrides": {"n_layers": 6}},
    "parallelism": {"pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_layers_per_stage": 1},
}
VALUES = {"model": {"name": "tests.forks.right.value_residual"}}


def graph(uses: str) -> dict[str, Any]:
    return {"model": {"name": "tests.block_graphs", "overrides": {"graph": uses}}}


# Each way in which a block may use what an earlier one has returned, on the same stage and on another one.
ALL_WAYS = graph(", ".join(f"{2 + place % 2} {way} {place % 2}" for place, way in enumerate(EXPLICIT)))
# What every change must pass. test_cover.py has every pair of a mesh, a schedule, and what else changes what a stage does.
CELLS: dict[str, tuple[Degrees, tuple[dict[str, Any], ...]]] = {
    "pp 2, GPipe, recomputed": (TWO, (FLAT, FULL)),
    "pp 2, three stages a rank": (TWO, (THREE_EACH,)),
    "pp 2, zero bubble, tied": (TWO, (ZERO_BUBBLE, FOUR_TIED)),
    "pp 2 x shard 2, tied, per operation": (SHARD, ({"model": {"flavor": "tied"}}, OPERATIONS)),
    "pp 2, values of the first block": (TWO, (VALUES,)),
    "pp 2, blocks applied twice": (TWO, ({"model": {"name": "tests.forks.right.looped"}},)),
    "pp 2, every way, interleaved, recomputed": (TWO, (ALL_WAYS, INTERLEAVED, FULL)),
}
SLOW: dict[str, tuple[Degrees, tuple[dict[str, Any], ...]]] = {
    "pp 2, LoopedBFS": (TWO, (BFS,)),
    "pp 2, mixture, zero bubble": (TWO, (MIXTURE, ZERO_BUBBLE)),
    "pp 4": (FOUR, ()),
    "pp 2 x shard 2, ep 2": ({**SHARD, "ep": 2}, (MIXTURE,)),
    "pp 2 x tp 2, interleaved": (TP, (INTERLEAVED,)),
    "pp 2, routers that see a choice": (TWO, ({"model": {"name": "tests.forks.right.routed_by_choice"}},)),
    "pp 4, every way, GPipe, per operation": (FOUR, (ALL_WAYS, FLAT, OPERATIONS)),
    "pp 2, every way, LoopedBFS": (TWO, (ALL_WAYS, BFS)),
    "pp 2, every way, compiled": (TWO, (ALL_WAYS, {"compile": {"enable": True, "backend": "aot_eager"}})),
    "pp 2 x shard 2, every way": (SHARD, (ALL_WAYS,)),
    "pp 2 x tp 2, every way": (TP, (ALL_WAYS,)),
    "pp 2 x cp 2, every way": ({"pp": 2, "cp": 2}, (ALL_WAYS,)),
}


def config_of_cell(degrees: Degrees, changes: tuple[dict[str, Any], ...]) -> Config:
    sections: dict[str, dict[str, Any]] = {"model": {"name": "tests.tiny", "flavor": "deep"}, "training": {"steps": 3}}
    for change in changes:
        for section, keys in change.items():
            sections[section] = {**sections.get(section, {}), **keys}
    microbatches = 4 // (degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)) if "pp" in degrees else 1
    return config_of(degrees, sections["model"].pop("flavor", "deep"), microbatches, **sections)


@functools.cache
def reference(pool: Pool, config: str) -> Trajectory:
    return pool.run("tests.distributed.scenarios:trajectory", degrees={}, config=Config.model_validate_json(config))[0][0]


@pytest.mark.parametrize("cell", slow_but([*CELLS], CELLS | SLOW))
def test_gradients_are_those_of_one_process(pools, cell, record_property):
    comparison = compared_with_one_process(pools, *(CELLS | SLOW)[cell])
    record_property("worst", str(comparison))
    assert [str(each) for each in comparison.excessive] == []
    assert comparison.of("gradients")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_random_graph_of_blocks_gives_what_one_process_gives(pools, seed):
    numbers = random.Random(seed)
    schedule = numbers.choice([{}, INTERLEAVED, FLAT, BFS])
    comparison = compared_with_one_process(pools, TWO, (graph(drawn(numbers, EXPLICIT)), schedule))
    assert [str(each) for each in comparison.excessive] == []


def compared_with_one_process(pools: dict[int, Pool], degrees: Degrees, changes: tuple[dict[str, Any], ...]) -> Comparison:
    there = config_of_cell(degrees, changes)
    alone = config_of_cell({}, tuple({key: change[key] for key in change if key != "parallelism"} for change in changes))
    alone = alone.model_copy(update={"compile": Config().compile, "activation_checkpoint": Config().activation_checkpoint})
    found, _ = pools[ranks_of(degrees)].run("tests.distributed.scenarios:trajectory", degrees=degrees, config=there)[0]
    return compare(found, reference(pools[1], alone.model_dump_json()))


@pytest.mark.parametrize("flavor", slow_but(["tied"], ["deep", "tied"]))
def test_a_run_goes_on_with_other_numbers_of_stages(pools, tmp_path, flavor):
    more = {"flavor": flavor, "training": {"local_batch_size": 2}}
    wide = FOUR if flavor == "deep" else TWO
    run(pools, TWO, tmp_path / "whole", STEPS, **more)
    for degrees, steps in ((TWO, 4), ({}, 8), (wide, STEPS)):
        run(pools, degrees, tmp_path / "parts", steps, **more)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    expected, found = stored(tmp_path / "whole", STEPS), stored(tmp_path / "parts", STEPS)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("degrees", [TWO, pytest.param(SHARD, marks=pytest.mark.slow)], ids=["pp 2", "pp 2 x shard 2"])
def test_on_the_same_mesh_a_resumed_run_is_equal_bit_for_bit(pools, tmp_path, degrees):
    more = {"flavor": "tied", "training": {"local_batch_size": 2}}
    run(pools, degrees, tmp_path / "whole", STEPS, **more)
    for steps in (5, STEPS):
        run(pools, degrees, tmp_path / "parts", steps, **more)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected, found = stored(tmp_path / "whole", STEPS), stored(tmp_path / "parts", STEPS)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_has_every_tensor_once_and_a_tied_one_under_one_name(pools, tmp_path):
    for degrees in ({}, TWO):
        run(pools, degrees, tmp_path / str(len(degrees)), 2, flavor="tied", training={"local_batch_size": 2})
    alone, split = stored(tmp_path / "0", 2), stored(tmp_path / "1", 2)
    assert alone.keys() == split.keys()
    assert "model.head.output.weight" not in split


def validated(degrees: Degrees) -> dict[str, float]:
    """Two rounds of validation with a step of training between them."""
    config = config_of(degrees, "deep", 4 if degrees else 1, validation={"enable": True, "steps": 3})
    mesh, data = mesh_of(degrees), learnable_data(config)
    model, _, scale = begin_training(family_of(config.model), config, mesh, CPU)
    first = validate(model, data, config, mesh, CPU)
    forward_backward(model, next(rank_batches(config, mesh)), mesh, scale)
    assert validate(model, data, config, mesh, CPU) == first
    return first


@pytest.mark.parametrize("degrees", [TWO, pytest.param(SHARD, marks=pytest.mark.slow)], ids=["pp 2", "pp 2 x shard 2"])
def test_every_rank_has_the_validation_loss_of_one_process(pools, degrees):
    expected = pools[1].run(f"{HERE}:validated", degrees={})[0]
    for found in pools[ranks_of(degrees)].run(f"{HERE}:validated", degrees=degrees):
        assert found == pytest.approx(expected, rel=1e-6)


def another_number_of_microbatches() -> str:
    config = config_of(TWO, "deep", 4)
    model, _, scale = begin_training(family_of(config.model), config, mesh_of(TWO), CPU)
    batch = next(rank_batches(config, mesh_of(TWO)))
    try:
        forward_backward(model, batch._replace(tokens=batch.tokens[:2]), mesh_of(TWO), scale)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_schedule_takes_no_other_number_of_microbatches(pools):
    assert all("a number of microbatches" in text for text in pools[2].run(f"{HERE}:another_number_of_microbatches"))


def passes_of(schedule: str) -> list[Action]:
    """What this rank runs in a step, in its order."""
    config = config_of(TWO, "deep", 4, parallelism={"pipeline_parallel_schedule": schedule})
    model, _, scale = begin_training(family_of(config.model), config, mesh_of(TWO), CPU)
    seen: list[Action] = []

    def noted(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def note(stage: LateStage, number: int, *words: Any, **named: Any) -> Any:
            seen.append(Action(kind if named.get("full_backward", True) else "I", stage.stage_index, number))
            return run(stage, number, *words, **named)

        return note

    forward = noted("F", LateStage.forward_one_chunk)
    backward = noted("B", LateStage.backward_one_chunk)
    weights = noted("W", LateStage.backward_weight_one_chunk)
    with patch.multiple(LateStage, forward_one_chunk=forward, backward_one_chunk=backward, backward_weight_one_chunk=weights):
        forward_backward(model, next(rank_batches(config, mesh_of(TWO))), mesh_of(TWO), scale)
    return seen


@pytest.mark.parametrize("schedule", STAGES_OF_A_RANK)
def test_ranks_run_what_is_rehearsed(pools, schedule):
    config = config_of(TWO, "deep", 4, parallelism={"pipeline_parallel_schedule": schedule})
    with pretended_ranks(2):
        expected = orders(config, 4, 2 * STAGES_OF_A_RANK[schedule])
    assert pools[2].run(f"{HERE}:passes_of", schedule=schedule) == expected


SENT = {
    "pp 2 x shard 2": (SHARD, ()),
    "pp 2 x shard 2, tied": (SHARD, ({"model": {"flavor": "tied"}},)),
    "pp 2 x tp 2, interleaved": (TP, (INTERLEAVED,)),
    "pp 2 x shard 2, interleaved, recomputed": (SHARD, (INTERLEAVED, FULL)),
    "pp 2 x replicate 2": ({"pp": 2, "dp_replicate": 2}, ()),
    "pp 2 x tp 2, values of the first block": (TP, (VALUES,)),
}


@pytest.mark.parametrize(
    "cell", slow_but(["pp 2 x shard 2", "pp 2 x tp 2, interleaved", "pp 2 x tp 2, values of the first block"], SENT)
)
def test_the_rank_that_holds_the_most_sends_what_is_predicted(pools, cell):
    degrees, changes = SENT[cell]
    config = config_of_cell(degrees, changes)
    config = replaced(config, parallelism={DEGREES[name]: degree for name, degree in degrees.items()})
    prediction = predict(config, 4, "cpu")
    calls, sizes = Counter(), Counter()
    for channel, traffic in prediction.work.traffic.items():
        calls[channel.kind, channel.ranks] += traffic.calls
        sizes[channel.kind, channel.ranks] += traffic.size
    rank = int(prediction.pipeline.split()[1]) * 2  # of the pipeline -> the first one with this stage
    sent, _ = pools[4].run("tests.distributed.test_communication:second_step", degrees=degrees, config=config)[rank]
    found_calls, found_sizes = Counter(), Counter()
    for (kind, members), (number, size) in sent.items():
        if len(members) > 1 and kind != "all-reduce":  # labels, norms: a few numbers
            found_calls[kind, len(members)] += number
            found_sizes[kind, len(members)] += size
    gathered = [key for key in calls if key[0] != "all-reduce"]
    assert found_calls == {key: calls[key] for key in gathered}
    assert found_sizes == {key: sizes[key] for key in gathered}


# ------------------------------------------------------------------------------------- faults that the comparison must find


def _first_microbatches(run: Callable[..., Any]) -> Callable[..., Any]:
    def stale(pipeline: Pipeline, way: Any, microbatches: Any, *words: Any) -> Any:
        return run(pipeline, way, pipeline.__dict__.setdefault("first", microbatches), *words)

    return stale


def _first_microbatch(stage: Stage, *received: torch.Tensor) -> Any:
    stage.microbatch = 0
    return forward_of(stage, *received)


forward_of, loss_of, cut_of = Stage.forward, Pipeline._backward_loss, pipeline_module.split_layers
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a microbatch counts four times": (Stage, "forward", _first_microbatch),
    "the loss is not divided": (Pipeline, "_backward_loss", lambda each, *words: loss_of(each, *words) * each._divisor),
    "labels of another microbatch": (Pipeline, "_backward_loss", lambda each, hidden, n: loss_of(each, hidden, (n + 1) % 4)),
    "the tied gradient of one stage": (Pipeline, "_add_tied_gradients", lambda each: None),
    "stages in another order": (pipeline_module, "split_layers", lambda *words: cut_of(*words)[::-1]),
    "inputs of the step before": (Pipeline, "_run", _first_microbatches(Pipeline._run)),
}


def with_fault(fault: str, config: Config) -> Trajectory | None:
    with patch.object(*FAULTS[fault]):
        found = trajectory(TWO, config)
    return found[0] if found else None


@pytest.mark.parametrize("fault", slow_but(["the tied gradient of one stage", "inputs of the step before"], FAULTS))
def test_a_fault_of_stages_is_found(pools, fault):
    config = config_of_cell(TWO, ({"model": {"flavor": "tied"}},))
    try:
        found = pools[2].run(f"{HERE}:with_fault", fault=fault, config=config)[0]
    except WorkerFailure as failure:  # a stage does not get what it needs
        assert fault == "stages in another order" and "titanlite/parallel/dataflow.py" in str(failure)
        return
    assert compare(found, reference(pools[1], config_of_cell({}, ({"model": {"flavor": "tied"}},)).model_dump_json())).excessive
