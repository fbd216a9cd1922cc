"""Adapters on a mesh: little traffic, and what a run begins from. test_cover.py has gradients, test_variants.py resumes."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import scenarios
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import CPU, config_of, first_microbatch, mesh_of
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, losses, run, stored
from titanlite.config.schema import Config
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model
from titanlite.registry.family import load_family
from titanlite.transforms import lora
from titanlite.transforms.parameters import A, B, is_adapter
from titanlite.verify.compare import Trajectory

HERE = "tests.distributed.test_lora"
SHARD, TP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}
KEYS = {"enable": True, "rank": 4, "alpha": 6.0}


# --------------------------------------------------------------------------------------------------------------- gradients


def trajectory_of_float32_masters(degrees: dict[str, int], config: Config) -> tuple[Trajectory, int] | None:
    adapt = lora.adapt
    with mock.patch.object(lora, "adapt", lambda model, keys, frozen: adapt(model, keys, torch.float32)):
        return scenarios.trajectory(degrees, config)


@pytest.mark.parametrize("degrees", [ONE, TP], ids=str)
def test_frozen_weights_in_bfloat16_compute_what_float32_masters_would(pools, degrees):
    config = config_of(degrees, training={"steps": 6, "mixed_precision_param": "bfloat16"}, lora=KEYS)
    pool = pools[math.prod(degrees.values())]
    found = pool.run(f"{HERE}:trajectory_of_float32_masters", degrees=degrees, config=config)[0][0]
    expected = pool.run("tests.distributed.scenarios:trajectory", degrees=degrees, config=config)[0][0]
    assert found.losses == expected.losses
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.float32}
    for name, tensor in expected.weights.items():
        assert tensor.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    assert {gradient.dtype for gradient in expected.gradients.values()} == {torch.float32}


# ----------------------------------------------------------------------------------------------------------------- traffic


class Collectives(TorchDispatchMode):
    """The kind and the size of every collective's input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kind = next((kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in str(function)), None)
        if kind and "c10d" in str(function):
            self.seen.append((kind, args[0].numel() if isinstance(args[0], Tensor) else 0))
        return function(*args, **(kwargs or {}))


def collectives(enable: bool) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Of the forward and the backward pass on tp 2."""
    config, mesh = config_of(TP, lora={**KEYS, "enable": enable}), mesh_of(TP)
    model = build_model(load_family("tests.tiny", "plain"), config, mesh, CPU)
    batch = first_microbatch(config, mesh)
    summed_loss(model, batch).backward()  # what is made at first use is not counted
    with Collectives() as forward:
        loss = summed_loss(model, batch)
    with Collectives() as backward:
        loss.backward()
    return forward.seen, backward.seen


def test_adapters_add_no_collective_but_small_sums_of_their_own_gradients(pools):
    forward, backward = pools[2].run(f"{HERE}:collectives", enable=True)[0]
    plain_forward, plain_backward = pools[2].run(f"{HERE}:collectives", enable=False)[0]
    assert forward == plain_forward
    # A of the five modules that are split by rows, B of the two that are split by columns
    of_adapters = 2 * [4 * 64] * 4 + 2 * [4 * 64] * 3
    assert sorted(size for kind, size in backward if kind == "all_reduce") == sorted(of_adapters)
    others = [seen for seen in backward if seen[0] != "all_reduce"]
    # less than without: neither the first block's input nor the embedding needs a gradient
    assert len(others) == len([seen for seen in plain_backward if seen[0] != "all_reduce"]) - 2


# -------------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def base(pools: dict[int, Pool], tmp_path_factory) -> Path:
    """A checkpoint of the whole model, of a few steps in one process."""
    folder = tmp_path_factory.mktemp("base")
    run(pools, ONE, folder, 5)
    return folder / "checkpoint/step-00000005"


def adapting(base: Path, **sections: Any) -> dict[str, Any]:
    return {"lora": {**KEYS, **sections.pop("lora", {})}, "checkpoint": {"initial_load_path": str(base)}, **sections}


@pytest.fixture(scope="module")
def whole(pools: dict[int, Pool], tmp_path_factory, base: Path) -> Path:
    """An uninterrupted run on 2 x 2 that adapts the base."""
    folder = tmp_path_factory.mktemp("whole")
    run(pools, TWO_BY_TWO, folder, STEPS, **adapting(base))
    return folder


def test_a_run_begins_from_a_base_without_adapters_and_learns_with_the_base_untouched(whole, base):
    found, before = stored(whole, STEPS), stored(base.parents[1], 5)
    frozen = {name for name in before if name.startswith("model.")}
    trained = {name for name in found if name.startswith("model.")} - frozen
    assert {name.rpartition(".")[2] for name in trained} == {A, B}
    for name in frozen:
        assert torch.equal(found[name], before[name]), name
    assert all(found[name].norm() > 0 for name in trained)
    assert {name.split(".", 1)[1].rpartition(".")[0] for name in found if name.startswith("optimizer.")} == {
        name.split(".", 1)[1] for name in trained
    }
    assert losses(whole)[-1] < losses(whole)[0] - 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "lora.rank = 8, was 4"),
        ({"modules": ["*.wq"]}, r"lora.modules = \['\*.wq'\], was \['layers.\*'\]"),
        ({"enable": False, "rank": 16, "alpha": 32.0}, "lora.enable = False, was True"),
        ({"alpha": 7.0}, "lora.alpha = 7.0, was 6.0"),
    ],
)
def test_adapters_of_another_shape_or_scale_do_not_resume(pools, tmp_path, base, change, message):
    run(pools, ONE, tmp_path, 5, **adapting(base))
    with pytest.raises(WorkerFailure, match=message):
        run(pools, ONE, tmp_path, 10, **adapting(base, lora=change))


def test_a_new_run_takes_over_adapters_where_there_are_some(pools, tmp_path, whole):
    run(pools, ONE, tmp_path, 1, **adapting(whole / "checkpoint/step-00000012"), optimizer={"lr": 1e-20})
    found, before = stored(tmp_path, 1), stored(whole, STEPS)
    for name in (name for name in before if name.startswith("model.")):
        assert torch.equal(found[name], before[name]), name


def test_a_run_without_adapters_is_not_begun_from_weights_with_some(pools, tmp_path, whole):
    with pytest.raises(WorkerFailure, match=r"step-00000012: its weights have adapters, which lora.enable = false"):
        run(pools, ONE, tmp_path, 1, checkpoint={"initial_load_path": str(whole / "checkpoint/step-00000012")})
