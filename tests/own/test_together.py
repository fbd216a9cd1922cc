"""All of a run's parts are the user's own at once: optimizer, loss, decay, and a map or a stream, on every kind of mesh."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.as_one import trajectory_of
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import config_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, Degrees, reports, run_config, same_tensors
from tests.own.parts import Lion, smoothed
from titanlite.checkpoint import manifest
from titanlite.parallel.mesh import ranks_of
from titanlite.transforms.shards import local_part
from titanlite.verify.compare import compare

RUNS, LION, SMOOTHED = "tests.own.data_runs", "tests.own.parts:Lion", "tests.own.parts:smoothed"
PARTS: dict[str, Any] = {
    "optimizer": {"name": LION, "lr": 1e-3},
    "lr_scheduler": {
        "warmup_steps": 1,
        "total_steps": 4,
        "decay_type": "tests.own.parts:inverse_sqrt",
        "options": {"power": 0.7},
    },
}
TRAINING = {"loss": SMOOTHED, "loss_options": {"share": 0.2}}
MOE = {"name": "tests.tiny_moe"}
CELLS: dict[str, tuple[Degrees, dict[str, Any], int]] = {
    "2 x 2": (TWO_BY_TWO, {}, 1),
    "pp 2": ({"pp": 2}, {}, 4),
    "cp 2": ({"cp": 2}, {}, 1),
    "ep 2": ({"dp_shard": 2, "ep": 2}, MOE, 1),
}


def sections_of(cell: str, optimizer: str = LION) -> dict[str, Any]:
    return {**PARTS, "optimizer": {**PARTS["optimizer"], "name": optimizer}, "model": CELLS[cell][1]}


def excessive(pools: dict[int, Pool], cell: str, optimizer: str = LION, loss: str = SMOOTHED) -> list[str]:
    """Differences from one process beyond rounding."""
    degrees, _, accumulation = CELLS[cell]
    found = []
    for mesh, microbatches in ((degrees, accumulation), (ONE, 1)):
        training = {**TRAINING, "steps": 4, "loss": loss, "dataset": "tests.own.parts:Sums"}
        config = config_of(mesh, accumulation=microbatches, training=training, **sections_of(cell, optimizer))
        found.append(trajectory_of(pools, mesh, config, f"{RUNS}:trajectory"))
    comparison = compare(*found)
    assert comparison.of("gradients")
    return [str(each) for each in comparison.excessive]


@pytest.mark.parametrize("cell", CELLS)
def test_a_map_and_the_other_parts_train_as_on_one_process(pools, cell):
    assert excessive(pools, cell) == []


@pytest.mark.parametrize("cell", ["2 x 2", "pp 2"])
def test_a_stream_and_the_other_parts_resume_bit_for_bit_and_train_as_on_one_process(pools, tmp_path, cell):
    degrees, _, accumulation = CELLS[cell]
    training = {**TRAINING, "dataset": "tests.own.data_parts:Node"}
    for folder, mesh, ends in (("one", ONE, [4]), ("whole", degrees, [4]), ("parts", degrees, [2, 4])):
        of_mesh = training | ({"local_batch_size": 8 // accumulation} if mesh and accumulation > 1 else {})
        for steps in ends:
            config = run_config(mesh, tmp_path / folder, steps, **sections_of(cell), training=of_mesh)
            pools[ranks_of(mesh)].run(f"{RUNS}:full_run", degrees=mesh, config=config)
    one, whole, parts = (
        [(each["loss"], each["grad_norm"]) for each in reports(tmp_path / folder)] for folder in ("one", "whole", "parts")
    )
    assert parts == whole and len(whole) == 4
    assert whole == [pytest.approx(each, rel=1e-5) for each in one]
    same_tensors(tmp_path / "parts", tmp_path / "whole", 4)
    saved = manifest.read(tmp_path / "parts/checkpoint/step-00000004")
    assert "return (max(1, start) / step) ** power" in saved.numbers["own_source"]["tests.own.parts"]["text"]
    (start, *_) = json.loads((tmp_path / "parts/provenance.json").read_text())
    assert start["own_source"] == saved.numbers["own_source"]


class OfTheShard(Lion):
    """Divides by a norm of the shard, which differs between meshes; its state is correct."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(local_part(self.state[p]["mean"] if p in self.state else p.grad).norm() + 1e-3)
        super().step(closure)


def loss_of_the_rank(logits, labels, share: float = 0.1):
    return smoothed(logits, labels, share) * (1 + dist.get_rank())


@pytest.mark.parametrize("code", [{"optimizer": f"{__name__}:OfTheShard"}, {"loss": f"{__name__}:loss_of_the_rank"}], ids=str)
def test_code_that_depends_on_the_rank_or_its_shard_is_found_by_comparing_meshes(pools, code):
    assert excessive(pools, "2 x 2", **code)


def decay_of_the_rank(step, start, end):
    return 1.0 if dist.get_rank() == 0 else 0.9


def test_a_decay_that_differs_between_ranks_is_refused_at_the_start(pools, tmp_path):
    schedule = {"decay_type": f"{__name__}:decay_of_the_rank", "min_lr_factor": 0.1}
    config = run_config({"dp_shard": 2}, tmp_path, 4, lr_scheduler=schedule)
    with pytest.raises(WorkerFailure, match=r'decay_of_the_rank": differs between ranks; .*test_together.py, line \d+\)'):
        pools[2].run("tests.distributed.scenarios:full_run", degrees={"dp_shard": 2}, config=config)
