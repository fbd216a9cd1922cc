"""The pipeline bubble, measured and predicted: python -m benchmarks.pipelines [--ranks 2] [--microbatches 8]

The bubble is the share of a step in which a rank computes no pass of a stage, over all ranks. "sleeping": a pass sleeps as long
as it takes by the model's FLOPs, so that ranks need no processors of their own; this measures PyTorch's schedule and its
messages. "computing": passes compute, with one thread each; there should be a processor for each rank, and "predicted again" is
the prediction from the measured times of each stage's passes. Medians of the steps after the first one.
"""

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.launch.local_ranks import on_ranks
from titanlite.loop.step import build_model, forward_backward
from titanlite.parallel.late_stage import LateStage
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.parallel.pipeline import STAGES_OF_A_RANK
from titanlite.plan.pipeline import orders, rehearse, stage_costs
from titanlite.plan.step import simulated_ranks
from titanlite.registry.family import family_of
from titanlite.transforms.meta import on_meta

Passes = dict[tuple[str, int], list[float]]  # kind and stage -> seconds of each pass
_METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


def config_of(schedule: str, ranks: int, microbatches: int, seq_len: int) -> Config:
    values: dict[str, Any] = {
        "model": {"name": "llama3", "flavor": "debug", "overrides": {"n_layers": 4 * ranks}},
        "training": {
            "seq_len": seq_len,
            "local_batch_size": 1,
            "global_batch_size": microbatches,
            "mixed_precision_param": "float32",
        },
        "parallelism": {"pipeline_parallel_degree": ranks, "pipeline_parallel_schedule": schedule},
    }
    return Config.model_validate(values)


def timed(kind: str, run: Callable[..., Any], passes: Passes, sleeps: list[float]) -> Callable[..., Any]:
    """A pass of a stage that records its seconds. sleeps: those of a forward pass of each stage; a backward pass sleeps twice
    as long.
    """

    def around(stage: LateStage, *words: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        result = run(stage, *words, **named)
        if sleeps:
            units = {"F": 1.0, "W": 1.0, "B": 2.0 if named.get("full_backward", True) else 1.0}[kind]
            time.sleep(max(0.0, units * sleeps[stage.stage_index] - (time.perf_counter() - begun)))
        passes[kind, stage.stage_index].append(time.perf_counter() - begun)
        return result

    return around


def measure(
    device: torch.device, config: Config, sleeps: list[float], steps: int
) -> tuple[float, dict[tuple[str, int], float]]:
    """(bubble of all ranks, seconds of each stage's forward and full backward pass); medians over steps."""
    ranks = config.parallelism.pipeline_parallel_degree
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1) | {"pp": ranks}, "cpu")
    model = build_model(family_of(config.model), config, mesh, device)
    assert model.pipeline is not None
    training, passes = config.training, defaultdict[tuple[str, int], list[float]](list)
    shape = model.pipeline.microbatches, 1, training.seq_len + 1
    tokens = torch.randint(512, shape, generator=torch.Generator().manual_seed(0))
    around = {name: timed(kind, getattr(LateStage, name), passes, sleeps) for name, kind in _METHODS.items()}
    idle, seconds = [], defaultdict[tuple[str, int], list[float]](list)
    with patch.multiple(LateStage, **around):
        for step in range(steps + 1):
            passes.clear()
            dist.barrier()
            begun = time.perf_counter()
            forward_backward(model, Batch(tokens), mesh)
            dist.barrier()
            elapsed = time.perf_counter() - begun
            busy = torch.tensor(sum(sum(each) for each in passes.values()))
            dist.all_reduce(busy)
            if step:  # not the first one, which allocates
                idle.append(1 - busy.item() / (ranks * elapsed))
                for stage in {stage for _, stage in passes}:
                    seconds["F", stage].append(sum(passes["F", stage]) / shape[0])
                    seconds["B", stage].append((sum(passes["B", stage]) + sum(passes["W", stage])) / shape[0])
    whole: list[Any] = [None] * ranks
    dist.all_gather_object(whole, {key: statistics.median(times) for key, times in seconds.items()})
    return statistics.median(idle), {key: value for part in whole for key, value in part.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512, help="of passes that compute")
    parser.add_argument("--pass-seconds", type=float, default=0.1, help="that the longest forward pass sleeps")
    parser.add_argument("--steps", type=int, default=5)
    words = parser.parse_args()
    print(f"llama3 debug, {4 * words.ranks} layers, {words.ranks} ranks, {words.microbatches} microbatches, bubble of a step")
    print("| schedule | predicted | sleeping | computing | predicted again |\n| --- | --- | --- | --- | --- |")
    for schedule in STAGES_OF_A_RANK:
        config, short = (config_of(schedule, words.ranks, words.microbatches, size) for size in (words.seq_len, 16))
        family = family_of(config.model)
        costs = stage_costs(config, family, on_meta(family, config))
        with simulated_ranks(words.ranks):
            order = orders(schedule, words.ranks, words.microbatches, len(costs))

        def predicted(forward: list[float], backward: list[float], order: Any = order) -> float:
            return rehearse(order, forward, backward).bubble

        run = functools.partial(on_ranks, words.ranks, measure)
        slept, _ = run(short, [words.pass_seconds * cost / max(costs) for cost in costs], words.steps)
        computed, seconds = run(config, [], words.steps)
        again = predicted(*([seconds[kind, stage] for stage in range(len(costs))] for kind in "FB"))
        shares = predicted(costs, [2 * cost for cost in costs]), slept, computed, again
        print(f"| {schedule} | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
