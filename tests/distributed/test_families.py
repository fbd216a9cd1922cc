"""P1 for every family: what makes it unlike Llama is the same on every mesh, compiled and checkpointed too."""

import math
from typing import NamedTuple

import pytest

from tests.distributed.pool import Pool
from tests.distributed.scenarios import GRAPHS, MODES, config_of
from titanlite.tools.compare import Trajectory, compare

MODELS = {
    "Qwen 3": ("tests.tiny_qwen3", "tied"),
    "Qwen 2": ("tests.tiny_qwen3", "biased"),
    "Gemma 3": ("tests.tiny_gemma3", "plain"),
    "Gemma 2": ("tests.tiny_gemma3", "two"),
    "OLMo 2": ("tests.tiny_olmo2", "plain"),
}
OWN_GRAPHS = {"Gemma 3": GRAPHS + 1, "Gemma 2": GRAPHS + 1}  # one for local layers, one for global ones
SHARD_2, TP_2, BOTH, ALL = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


class Row(NamedTuple):
    degrees: dict[str, int]
    mode: str = "none"  # of activation checkpointing
    compiled: bool = False


ROWS = {
    "shard 2": Row(SHARD_2),
    "tp 2": Row(TP_2),
    "compiled, full checkpointing, shard 2 x tp 2": Row(BOTH, "full", compiled=True),
    "compiled, by operation, tp 2": Row(TP_2, "per operation", compiled=True),
}


@pytest.fixture(scope="module")
def one_process(pools: dict[int, Pool]) -> dict[str, Trajectory]:
    """The reference run of each model."""
    return {name: run(pools, name, Row({}))[0] for name in MODELS}


def run(pools: dict[int, Pool], name: str, row: Row) -> tuple[Trajectory, int]:
    module, flavor = MODELS[name]
    config = config_of(
        row.degrees,
        flavor,
        model={"name": module},
        training={"steps": 6},
        activation_checkpoint=MODES[row.mode],
        compile={"enable": row.compiled, "backend": "aot_eager"},
    )
    ranks = math.prod(row.degrees.values())
    return pools[ranks].run("tests.distributed.scenarios:trajectory", degrees=row.degrees, config=config)[0]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_a_family_on_a_mesh_gives_what_one_plain_process_gives(pools, one_process, name, row):
    found, graphs = run(pools, name, ROWS[row])
    result = compare(found, one_process[name])
    print(name, row, result)
    assert result.equal, result.excessive
    if ROWS[row].compiled:
        assert graphs == OWN_GRAPHS.get(name, GRAPHS)


def test_the_reference_runs_learn(one_process):
    for reference in one_process.values():
        assert reference.losses[-1] < 0.95 * reference.losses[0]


def test_on_eight_ranks_too(pools, one_process):
    result = compare(run(pools, "Gemma 3", Row(ALL))[0], one_process["Gemma 3"])
    assert result.equal, result.excessive
