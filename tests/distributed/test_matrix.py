"""P1: the mesh does not change the mathematics. Every mesh is held against one process."""

from typing import NamedTuple

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.scenarios import config_of
from titanlite.tools.compare import Trajectory, compare


class Cell(NamedTuple):
    """A mesh, and what is special about the run on it."""

    degrees: dict[str, int]
    flavor: str = "plain"
    accumulation: int = 1
    reshard: str | int = "default"
    options: dict[str, object] | None = None  # more of [parallelism]

    @property
    def ranks(self) -> int:
        product = 1
        for degree in self.degrees.values():
            product *= degree
        return product


CELLS = {
    "shard 2": Cell({"dp_shard": 2}),
    "shard 4": Cell({"dp_shard": 4}),
    "tp 2": Cell({"tp": 2}),
    "tp 4": Cell({"tp": 4}),
    "shard 2 x tp 2": Cell({"dp_shard": 2, "tp": 2}),
    "replicate 2": Cell({"dp_replicate": 2}),
    "replicate 2 x shard 2": Cell({"dp_replicate": 2, "dp_shard": 2}),
    "replicate 2 x tp 2": Cell({"dp_replicate": 2, "tp": 2}),
    "replicate 2 x shard 2 x tp 2": Cell({"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    "shard 4 x tp 2": Cell({"dp_shard": 4, "tp": 2}),
    "accumulation 2 in one process": Cell({}, accumulation=2),
    "accumulation 2 on shard 2 x tp 2": Cell({"dp_shard": 2, "tp": 2}, accumulation=2),
    "shard-grad-op": Cell({"dp_shard": 2}, reshard="never"),
    "always reshard": Cell({"dp_shard": 2, "tp": 2}, reshard="always"),
    "integer reshard": Cell({"dp_shard": 4}, reshard=2),
    "hybrid grad-op": Cell({"dp_replicate": 2, "dp_shard": 2}, reshard="never"),
    "prefetch of 2": Cell({"dp_shard": 4}, options={"fsdp_prefetch": 2}),
    "reduction after the last microbatch": Cell({"dp_shard": 2}, accumulation=2, options={"reduce_every_microbatch": False}),
    "reduction after the last microbatch, replicate 2 x shard 2 x tp 2": Cell(
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, accumulation=2, options={"reduce_every_microbatch": False}
    ),
    "tied, shard 2": Cell({"dp_shard": 2}, flavor="tied"),
    "tied, tp 2": Cell({"tp": 2}, flavor="tied"),
    "tied, shard 2 x tp 2": Cell({"dp_shard": 2, "tp": 2}, flavor="tied"),
    "tied, replicate 2 x shard 2 x tp 2": Cell({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, flavor="tied"),
    "vocabulary 515, tp 2": Cell({"tp": 2}, flavor="uneven"),
    "vocabulary 515, tp 4": Cell({"tp": 4}, flavor="uneven"),
    "vocabulary 515, shard 4": Cell({"dp_shard": 4}, flavor="uneven"),
    "vocabulary 515, shard 2 x tp 2": Cell({"dp_shard": 2, "tp": 2}, flavor="uneven"),
    "vocabulary 515, shard 4 x tp 2": Cell({"dp_shard": 4, "tp": 2}, flavor="uneven"),
}


@pytest.fixture(scope="module")
def one_process(pools: dict[int, Pool]) -> dict[str, Trajectory]:
    """The reference run of each flavour."""
    return {flavor: run(pools, Cell({}, flavor=flavor)) for flavor in ("plain", "tied", "uneven")}


def run(pools: dict[int, Pool], cell: Cell, precision: str = "float32") -> Trajectory:
    config = config_of(
        cell.degrees,
        cell.flavor,
        cell.accumulation,
        training={"mixed_precision_param": precision},
        parallelism={"fsdp_reshard_after_forward": cell.reshard, **(cell.options or {})},
    )
    return pools[cell.ranks].run("tests.distributed.scenarios:trajectory", degrees=cell.degrees, config=config)[0][0]


def test_the_reference_run_learns(one_process):
    for reference in one_process.values():
        assert reference.losses[-1] < 0.7 * reference.losses[0]


@pytest.mark.parametrize("name", CELLS)
def test_a_mesh_gives_the_weights_batches_losses_norms_and_gradients_of_one_process(pools, one_process, name, record_property):
    cell = CELLS[name]
    result = compare(run(pools, cell), one_process[cell.flavor])
    record_property("differences", str(result))
    print(f"{name}: {result}")
    assert result.equal, result.excessive


def test_bfloat16_follows_float32_on_every_mesh_and_keeps_float32_masters(pools, one_process):
    names = ["shard 2", "tp 2", "shard 4", "shard 2 x tp 2", "replicate 2 x shard 2 x tp 2"]
    runs = [run(pools, Cell({}), "bfloat16"), *(run(pools, CELLS[name], "bfloat16") for name in names)]
    reference = one_process["plain"].losses
    for found in runs:
        assert found.dtypes == {torch.float32}
        assert found.losses != reference
        assert max(abs(a / b - 1) for a, b in zip(found.losses, reference, strict=True)) < 5e-3
    for step, losses in enumerate(zip(*(found.losses for found in runs), strict=True), 1):
        assert max(losses) / min(losses) - 1 < 5e-4, f"meshes differ at step {step}: {losses}"
