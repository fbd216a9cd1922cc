"""A pipeline's stages: the weights, batches, losses, norms and gradients of one process, and the predicted memory.
test_variants.py resumes.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from tests.block_graphs import EXPLICIT, drawn
from tests.distributed.as_one import as_one_process
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, MODES, config_of, mesh_of, rank_batches
from tests.distributed.test_resume import Degrees
from tests.repetitions import slow_but
from titanlite.config.schema import Config
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.parallel.late_stage import LateStage
from titanlite.parallel.mesh import DEGREES, ranks_of
from titanlite.parallel.pipeline import STAGES_OF_A_RANK
from titanlite.plan.pipeline import Action, orders
from titanlite.plan.predict import predict
from titanlite.plan.record import Allocations
from titanlite.plan.step import local_bytes, simulated_ranks
from titanlite.registry.family import family_of
from titanlite.verify.compare import replaced

HERE = "tests.distributed.test_pipeline"
TWO, FOUR = {"pp": 2}, {"pp": 4}
SHARD, TP = {"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}
FULL, OPERATIONS = ({"activation_checkpoint": MODES[mode]} for mode in ("full", "per operation"))
INTERLEAVED, FLAT, BFS = (
    {"parallelism": {"pipeline_parallel_schedule": name}} for name in ("Interleaved1F1B", "GPipe", "LoopedBFS")
)
FOUR_TIED = {"model": {"flavor": "tied", "overrides": {"n_layers": 4}}}
THREE_EACH = {
    "model": {"overrides": {"n_layers": 6}},
    "parallelism": {"pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_layers_per_stage": 1},
}
VALUES = {"model": {"name": "tests.forks.right.value_residual"}}


def graph(uses: str) -> dict[str, Any]:
    return {"model": {"name": "tests.block_graphs", "overrides": {"graph": uses}}}


# Each way in which a block may use results of an earlier one, on the same stage and on another one.
ALL_WAYS = graph(", ".join(f"{2 + place % 2} {way} {place % 2}" for place, way in enumerate(EXPLICIT)))
# The cells of `make test`. test_cover.py has every pair of a mesh, a schedule, and a feature that changes a stage.
CELLS: dict[str, tuple[Degrees, tuple[dict[str, Any], ...]]] = {
    "pp 2, GPipe, recomputed": (TWO, (FLAT, FULL)),
    "pp 2, three stages a rank": (TWO, (THREE_EACH,)),
    "pp 2, interleaved, tied": (TWO, (INTERLEAVED, FOUR_TIED)),
    "pp 2 x shard 2, tied by a fork, per operation": (SHARD, ({"model": {"name": "tests.forks.tied_by_itself"}}, OPERATIONS)),
    "pp 2, values of the first block": (TWO, (VALUES,)),
    "pp 2, blocks applied twice": (TWO, ({"model": {"name": "tests.forks.right.looped"}},)),
    "pp 2, every way, interleaved, recomputed": (TWO, (ALL_WAYS, INTERLEAVED, FULL)),
}
SLOW: dict[str, tuple[Degrees, tuple[dict[str, Any], ...]]] = {
    "pp 2, routers that see a choice": (TWO, ({"model": {"name": "tests.forks.right.routed_by_choice"}},)),
    "pp 4, every way, GPipe, per operation": (FOUR, (ALL_WAYS, FLAT, OPERATIONS)),
    "pp 2, every way, compiled": (TWO, (ALL_WAYS, {"compile": {"enable": True, "backend": "aot_eager"}})),
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


@pytest.mark.parametrize("cell", slow_but([*CELLS], CELLS | SLOW))
def test_gradients_are_those_of_one_process(pools, cell):
    assert_as_one_process(pools, *(CELLS | SLOW)[cell])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_random_graph_of_blocks_equals_one_process(pools, seed):
    numbers = random.Random(seed)
    schedule = numbers.choice([{}, INTERLEAVED, FLAT, BFS])
    assert_as_one_process(pools, TWO, (graph(drawn(numbers, EXPLICIT)), schedule))


def assert_as_one_process(pools: dict[int, Pool], degrees: Degrees, changes: tuple[dict[str, Any], ...]) -> None:
    """The one process neither compiles nor recomputes."""

    def configured(mesh: Degrees) -> Config:
        left_out = () if mesh else ("parallelism", "compile", "activation_checkpoint")
        return config_of_cell(mesh, tuple({key: change[key] for key in change if key not in left_out} for change in changes))

    as_one_process(pools, degrees, configured)


def another_number_of_microbatches() -> str:
    config = config_of(TWO, "deep", 4)
    model, _, scale = begin_training(family_of(config.model), config, mesh_of(TWO), CPU)
    batch = next(rank_batches(config, mesh_of(TWO)))
    try:
        forward_backward(model, batch._replace(tokens=batch.tokens[:2]), mesh_of(TWO), scale)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_schedule_refuses_another_number_of_microbatches(pools):
    assert all("a number of microbatches" in text for text in pools[2].run(f"{HERE}:another_number_of_microbatches"))


def passes_of(schedule: str) -> list[Action]:
    """The passes of this rank in a step, in order."""
    config = config_of(TWO, "deep", 4, parallelism={"pipeline_parallel_schedule": schedule})
    model, _, scale = begin_training(family_of(config.model), config, mesh_of(TWO), CPU)
    seen: list[Action] = []

    def noted(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def note(stage: LateStage, number: int, *words: Any, **named: Any) -> Any:
            seen.append(Action(kind, stage.stage_index, number))
            return run(stage, number, *words, **named)

        return note

    forward = noted("F", LateStage.forward_one_chunk)
    backward = noted("B", LateStage.backward_one_chunk)
    with patch.multiple(LateStage, forward_one_chunk=forward, backward_one_chunk=backward):
        forward_backward(model, next(rank_batches(config, mesh_of(TWO))), mesh_of(TWO), scale)
    return seen


@pytest.mark.parametrize("schedule", STAGES_OF_A_RANK)
def test_ranks_run_the_predicted_passes(pools, schedule):
    with simulated_ranks(2):
        expected = orders(schedule, 2, 4, 2 * STAGES_OF_A_RANK[schedule])
    assert pools[2].run(f"{HERE}:passes_of", schedule=schedule) == expected


SENT = {
    "pp 2 x shard 2": (SHARD, ()),
    "pp 2 x tp 2, interleaved, values of the first block": (TP, (INTERLEAVED, VALUES)),
}


@pytest.mark.parametrize("cell", slow_but(["pp 2 x shard 2"], SENT))
def test_the_rank_with_the_most_memory_sends_what_is_predicted(pools, cell):
    degrees, changes = SENT[cell]
    config = config_of_cell(degrees, changes)
    config = replaced(config, parallelism={DEGREES[name]: degree for name, degree in degrees.items()})
    prediction = predict(config, 4, "cpu")
    calls, sizes = Counter(), Counter()
    for channel, traffic in prediction.work.traffic.items():
        calls[channel.kind, channel.ranks] += traffic.calls
        sizes[channel.kind, channel.ranks] += traffic.size
    rank = int(prediction.pipeline.split()[1]) * 2  # of the pipeline -> the first rank with this stage
    sent = pools[4].run("tests.distributed.test_communication:second_step", degrees=degrees, config=config)[rank]
    found_calls, found_sizes = Counter(), Counter()
    for (kind, members), (number, size) in sent.items():
        if len(members) > 1 and kind != "all-reduce":  # labels, norms: a few values
            found_calls[kind, len(members)] += number
            found_sizes[kind, len(members)] += size
    gathered = [key for key in calls if key[0] != "all-reduce"]
    assert found_calls == {key: calls[key] for key in gathered}
    assert found_sizes == {key: sizes[key] for key in gathered}


# ----------------------------------------------------------------------------------------------------------------- memory


def held(degrees: dict[str, int], config: Config) -> tuple[int, int, int]:
    """(bytes of this rank's master weights, of its optimizer state, of everything else at the peak) in a second step."""
    mesh = mesh_of(degrees)
    model, _, scale = begin_training(family_of(config.model), config, mesh, CPU)
    optimizer = build_optimizer(model, config.optimizer)
    batches, watch = rank_batches(config, mesh), Allocations()
    for step in range(2):
        batch = next(batches)
        with watch if step else contextlib.nullcontext():
            forward_backward(model, batch, mesh, scale)
            update(model, optimizer, 1e-3, 1.0)
    state = sum(local_bytes(t) for each in optimizer.state.values() for t in each.values() if t.ndim)
    return sum(map(local_bytes, model.parameters())), state, max(watch.peaks.values())


def long_cell(degrees: dict[str, int], schedule: str, **sections: Any) -> tuple[dict[str, int], Config]:
    sections.setdefault("training", {"seq_len": 128, "local_batch_size": 1})
    parallelism = {"pipeline_parallel_schedule": schedule}
    config = config_of(degrees, "deep", 8, parallelism=parallelism, **sections)
    return degrees, replaced(config, parallelism={DEGREES[name]: degree for name, degree in degrees.items()})


HELD = {
    "GPipe, recomputed": long_cell({"pp": 2}, "GPipe", **FULL),
    "pp 4": long_cell({"pp": 4}, "1F1B"),
    "pp 2 x shard 2, interleaved, recomputed": long_cell({"pp": 2, "dp_shard": 2}, "Interleaved1F1B", **FULL),
    "pp 2 x tp 2, LoopedBFS, per operation": long_cell({"pp": 2, "tp": 2}, "LoopedBFS", **OPERATIONS),
}


@pytest.mark.parametrize("name", slow_but(["GPipe, recomputed"], HELD))
def test_the_rank_with_the_most_memory_holds_what_is_predicted(pools, name):
    degrees, config = HELD[name]
    prediction = predict(config, ranks_of(degrees), "cpu")
    found = [sum(each) for each in pools[ranks_of(degrees)].run(f"{HERE}:held", degrees=degrees, config=config)]
    # gathered parameters are counted as if all existed at the peak
    assert 0.88 * prediction.memory.total < max(found) < 1.03 * prediction.memory.total
    most = int(prediction.pipeline.split()[1])
    ranks = len(found) // degrees["pp"]
    assert max(found[most * ranks : (most + 1) * ranks]) > 0.95 * max(found)
