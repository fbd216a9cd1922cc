"""P1 goes on: neither torch.compile nor activation checkpointing changes the mathematics, on any mesh."""

import functools
import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.recompute import kept_bytes
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, GLOBAL_BATCH, GRAPHS, MODES, config_of, first_microbatch, mesh_of
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model
from titanlite.tools.compare import Trajectory, compare
from titanlite.transforms.registry import Family, load_family

HERE = "tests.distributed.test_recompute_matrix"
MESHES = {"one process": {}, "shard 2": {"dp_shard": 2}, "tp 2": {"tp": 2}, "shard 2 x tp 2": {"dp_shard": 2, "tp": 2}}
STEPS = 6

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason='backend "inductor" needs a C++ compiler on a CPU')


@pytest.fixture(scope="module")
def one_process(pools: dict[int, Pool]) -> Trajectory:
    """The reference: one process, nothing compiled, nothing computed twice."""
    return run(pools, {}, "none", None)[0]


def run(
    pools: dict[int, Pool], degrees: dict[str, int], mode: str, backend: str | None, unit: str = "block"
) -> tuple[Trajectory, int]:
    """What happened, and how many graphs were compiled for it."""
    config = config_of(
        degrees,
        training={"steps": STEPS},
        activation_checkpoint=MODES[mode],
        compile={"enable": backend is not None, "backend": backend or "inductor", "unit": unit},
    )
    ranks = math.prod(degrees.values())
    return pools[ranks].run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0]


def assert_equal_within_rounding(found: Trajectory, reference: Trajectory) -> None:
    result = compare(found, reference)
    print(result)
    assert result.equal, result.excessive


# Every mode on one process and where both kinds of parallelism meet; each kind alone once.
@pytest.mark.parametrize(
    ("mesh", "mode"),
    [*itertools.product(["one process", "shard 2 x tp 2"], MODES), ("shard 2", "per operation"), ("tp 2", "full")],
)
def test_compiled_and_checkpointed_every_mesh_gives_what_one_plain_process_gives(pools, one_process, mesh, mode):
    found, graphs = run(pools, MESHES[mesh], mode, "aot_eager")
    assert_equal_within_rounding(found, one_process)
    assert graphs == GRAPHS


@pytest.mark.parametrize("mode", MODES)
def test_all_blocks_as_one_graph_give_what_they_give_one_by_one(pools, one_process, mode):
    found, graphs = run(pools, {}, mode, "aot_eager", unit="model")
    assert_equal_within_rounding(found, one_process)
    assert graphs == GRAPHS


@needs_compiler
@pytest.mark.parametrize(
    ("mesh", "mode"),
    [("one process", "none"), ("shard 2 x tp 2", "per operation"), ("shard 2 x tp 2", "budget"), ("tp 2", "full")],
)
def test_inductors_kernels_give_what_one_plain_process_gives(pools, one_process, mesh, mode):
    found, graphs = run(pools, MESHES[mesh], mode, "inductor")
    assert_equal_within_rounding(found, one_process)
    assert graphs == GRAPHS


@pytest.mark.parametrize(
    ("mesh", "mode"),
    [*itertools.product(["one process", "shard 2 x tp 2"], ["full", "every second layer", "per operation"])],
)
def test_checkpointed_without_compile_every_mesh_gives_what_one_plain_process_gives(pools, one_process, mesh, mode):
    found, graphs = run(pools, MESHES[mesh], mode, None)
    assert_equal_within_rounding(found, one_process)
    assert graphs == 0


# ------------------------------------------------------------------------------------------- what enters a compiled block


def types_at_compiled_parts() -> tuple[set[str], float]:
    """(types of the tensors that blocks and head are given, norm of the embedding's gradient)."""
    degrees = {"tp": 2}
    config = config_of(degrees, compile={"enable": True, "backend": "aot_eager"})
    mesh = mesh_of(degrees)
    model = build_model(load_family("tests.tiny", "plain"), config, mesh, CPU)
    seen: set[str] = set()
    for part in (*model.layers.values(), model.head):
        part.register_forward_pre_hook(lambda _, args: seen.add(type(args[0]).__name__))
    summed_loss(model, first_microbatch(config, mesh)).backward()
    return seen, model.embed.weight.grad.full_tensor().norm().item()


def test_no_asynchronous_tensor_enters_a_compiled_block_and_the_embedding_has_its_gradient(pools):
    # an AsyncCollectiveTensor there gives the embedding a zero gradient while the loss looks right
    for seen, norm in pools[2].run(f"{HERE}:types_at_compiled_parts"):
        assert seen == {"Tensor"}
        assert norm > 0.01


# ----------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(mode: dict[str, object], backend: str | None, keep: bool = False) -> tuple[int, int]:
    """(bytes that the blocks leave in memory between forward and backward pass, graphs that were compiled)."""
    config = config_of(
        {}, "deep", activation_checkpoint=mode, compile={"enable": backend is not None, "backend": backend or "eager"}
    )
    torch._dynamo.reset()
    counters.clear()
    family = load_family("tests.tiny", "deep")
    if keep:
        family = Family(SimpleNamespace(**vars(family.module), KEEP=(torch.ops.aten.silu.default,)), family.config)
    model = build_model(family, config, mesh_of({}), CPU)
    return kept_bytes(model, first_microbatch(config, mesh_of({})).inputs()), counters["stats"]["unique_graphs"]


@functools.cache
def _measured(pool: Pool) -> dict[str, int]:
    plain = {mode: (keys, None) for mode, keys in MODES.items() if mode != "budget"}
    compiled = {f"{mode}, compiled": (keys, "aot_eager") for mode, (keys, _) in plain.items()}
    budgets = {f"budget {share}": ({"mode": "memory_budget", "memory_budget": share}, "aot_eager") for share in (0.0, 0.3, 1.0)}
    measured = {}
    for name, (keys, backend) in (plain | compiled | budgets).items():
        measured[name], graphs = pool.run(f"{HERE}:saved_bytes", mode=keys, backend=backend)[0]
        assert (graphs > 0) == (backend is not None)
    return measured


def test_every_mode_keeps_less_for_the_backward_pass_than_the_one_that_computes_less_again(pools):
    kept = _measured(pools[1])
    print({mode: f"{size / kept['none']:.2f}" for mode, size in kept.items()})
    assert kept["full"] < kept["every second layer"] < kept["none"]
    assert kept["full"] < kept["per operation"] < 0.75 * kept["none"]
    assert kept["full, compiled"] < kept["per operation, compiled"] < 0.75 * kept["none, compiled"]
    assert kept["budget 0.0"] < kept["budget 0.3"] < kept["budget 1.0"] < kept["none"]


def test_a_model_adds_to_what_is_kept_by_its_own_table(pools):
    without = _measured(pools[1])["per operation"]
    more, _ = pools[1].run(f"{HERE}:saved_bytes", mode=MODES["per operation"], backend=None, keep=True)[0]
    silu = 4 * GLOBAL_BATCH * 32 * 96 * 4  # layers x sequences x tokens x features x bytes
    assert more - without == silu
