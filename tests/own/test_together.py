"""All of a run's parts are the user's own at once: optimizer, loss, decay, and a map or a stream, on every kind of mesh."""

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.scenarios import config_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, Degrees, reports, run_config, stored
from tests.own.parts import Lion
from tests.repetitions import slow_but
from titanlite.parallel.mesh import ranks_of
from titanlite.transforms.shards import local_part
from titanlite.verify.compare import compare

RUNS = "tests.own.data_runs"
PARTS: dict[str, Any] = {
    "optimizer": {"name": "tests.own.parts:Lion", "lr": 1e-3},
    "lr_scheduler": {
        "warmup_steps": 1,
        "total_steps": 4,
        "decay_type": "tests.own.parts:inverse_sqrt",
        "options": {"power": 0.7},
    },
}
TRAINING = {"loss": "tests.own.parts:smoothed", "loss_options": {"share": 0.2}}
MOE = {"name": "tests.tiny_moe"}
CELLS: dict[str, tuple[Degrees, dict[str, Any], int]] = {
    "2 x 2": (TWO_BY_TWO, {}, 1),
    "pp 2": ({"pp": 2}, {}, 4),
    "cp 2": ({"cp": 2}, {}, 1),
    "ep 2": ({"dp_shard": 2, "ep": 2}, MOE, 1),
}


def sections_of(cell: str, optimizer: str = "tests.own.parts:Lion") -> dict[str, Any]:
    return {**PARTS, "optimizer": {**PARTS["optimizer"], "name": optimizer}, "model": CELLS[cell][1]}


def excessive(pools: dict[int, Pool], cell: str, **optimizer: str) -> list[str]:
    """What differs by more than rounding from one process."""
    degrees, _, accumulation = CELLS[cell]
    found = []
    for mesh, microbatches in ((degrees, accumulation), (ONE, 1)):
        training = {**TRAINING, "steps": 4, "dataset": "tests.own.parts:Sums"}
        config = config_of(mesh, accumulation=microbatches, training=training, **sections_of(cell, **optimizer))
        found.append(pools[ranks_of(mesh)].run(f"{RUNS}:trajectory", degrees=mesh, config=config)[0])
    comparison = compare(*found)
    assert comparison.of("gradients")
    return [str(each) for each in comparison.excessive]


@pytest.mark.parametrize("cell", CELLS)
def test_a_map_and_the_other_parts_train_as_on_one_process(pools, cell):
    assert excessive(pools, cell) == []


@pytest.mark.parametrize("cell", slow_but(["2 x 2", "pp 2"], CELLS))
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
    expected, found = (stored(tmp_path / folder, 4) for folder in ("whole", "parts"))
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


class OfTheShard(Lion):
    """Divides by a norm of the shard, which another mesh cuts otherwise; its state is as it should be."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(local_part(self.state[p]["mean"] if p in self.state else p.grad).norm() + 1e-3)
        super().step(closure)


def test_state_that_is_read_by_the_shard_is_found_where_meshes_are_compared(pools):
    assert excessive(pools, "2 x 2", optimizer=f"{__name__}:OfTheShard")
