"""Adapters on a mesh: little traffic, and what a run starts from. test_cover.py has gradients, test_variants.py resumes."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import titanlite
from tests.distributed import scenarios
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import CPU, config_of, first_microbatch, mesh_of
from tests.distributed.test_communication import Sent
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, losses, run, stored
from titanlite.checkpoint.whole import Stored
from titanlite.config.schema import Config
from titanlite.hf.export import Exported
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model
from titanlite.registry.family import load_family
from titanlite.transforms import lora
from titanlite.transforms.parameters import A, B, is_adapter
from titanlite.verify.compare import Trajectory

HERE = "tests.distributed.test_lora"
TP = {"tp": 2}
KEYS = {"enable": True, "rank": 4, "alpha": 6.0}


# --------------------------------------------------------------------------------------------------------------- gradients


def trajectory_of_float32_masters(degrees: dict[str, int], config: Config) -> tuple[Trajectory, int] | None:
    adapt = lora.adapt
    with mock.patch.object(lora, "adapt", lambda model, keys, frozen: adapt(model, keys, torch.float32)):
        return scenarios.trajectory(degrees, config)


def test_frozen_bfloat16_weights_compute_the_same_as_float32_masters(pools):
    config = config_of(TP, training={"steps": 6, "mixed_precision_param": "bfloat16"}, lora=KEYS)
    found = pools[2].run(f"{HERE}:trajectory_of_float32_masters", degrees=TP, config=config)[0][0]
    expected = pools[2].run("tests.distributed.scenarios:trajectory", degrees=TP, config=config)[0][0]
    assert found.losses == expected.losses
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.float32}
    for name, tensor in expected.weights.items():
        assert tensor.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    assert {gradient.dtype for gradient in expected.gradients.values()} == {torch.float32}


# ----------------------------------------------------------------------------------------------------------------- traffic


def collectives(enable: bool) -> tuple[Counter[str], Counter[str], int]:
    """Collectives of the forward and the backward pass on tp 2; bytes that the backward pass reduces."""
    config, mesh = config_of(TP, lora={**KEYS, "enable": enable}), mesh_of(TP)
    model = build_model(load_family("tests.tiny", "plain"), config, mesh, CPU)
    batch = first_microbatch(config, mesh)
    summed_loss(model, batch).backward()  # the first use is not counted
    with Sent() as forward:
        loss = summed_loss(model, batch)
    with Sent() as backward:
        loss.backward()
    return forward.kinds(), backward.kinds(), backward.bytes["all-reduce", (0, 1)]


def test_adapters_add_no_collective_but_small_sums_of_their_own_gradients(pools):
    forward, backward, added = pools[2].run(f"{HERE}:collectives", enable=True)[0]
    plain_forward, plain_backward, _ = pools[2].run(f"{HERE}:collectives", enable=False)[0]
    assert forward == plain_forward
    # in each of two layers, A of the four modules that are split by rows, B of the three that are split by columns
    assert (backward.pop("all-reduce"), added) == (2 * 7, 2 * 7 * 4 * 64 * 4)
    # fewer than without adapters: neither the first block's input nor the embedding needs a gradient
    del plain_backward["all-reduce"]
    assert backward.total() == plain_backward.total() - 2


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


def test_a_run_starts_from_a_base_without_adapters_and_does_not_change_it(whole, base):
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


def test_a_new_run_loads_adapters_if_the_checkpoint_has_them(pools, tmp_path, whole):
    run(pools, ONE, tmp_path, 1, **adapting(whole / "checkpoint/step-00000012"), optimizer={"lr": 1e-20})
    found, before = stored(tmp_path, 1), stored(whole, STEPS)
    for name in (name for name in before if name.startswith("model.")):
        assert torch.equal(found[name], before[name]), name


def test_a_new_run_loads_adapters_of_another_alpha_only_if_that_is_allowed(pools, tmp_path, whole):
    keys = adapting(whole / "checkpoint/step-00000012", lora={"alpha": 12.0})
    with pytest.raises(WorkerFailure, match=r"trained with lora.alpha = 6, and lora.alpha = 12 .* --checkpoint.allow_changes"):
        run(pools, ONE, tmp_path, 1, **keys)
    run(pools, ONE, tmp_path, 1, **{**keys, "checkpoint": {**keys["checkpoint"], "allow_changes": ["lora.alpha"]}})


def test_a_run_without_adapters_refuses_weights_with_adapters(pools, tmp_path, whole):
    with pytest.raises(WorkerFailure, match=r"step-00000012: its weights have adapters, which lora.enable = false"):
        run(pools, ONE, tmp_path, 1, checkpoint={"initial_load_path": str(whole / "checkpoint/step-00000012")})


def test_an_export_rounds_a_merged_weight_once_to_its_dtype(pools, tmp_path, base):
    keys = {"training": {"mixed_precision_param": "bfloat16"}, "optimizer": {"lr": 1e-2}}
    run(pools, ONE, tmp_path, 2, **adapting(base, **keys))
    source, layer, found = tmp_path / "checkpoint/step-00000002", "model.layers.0.attention.wq", stored(tmp_path, 2)
    weight, a, b = (found[f"{layer}.{name}"].double() for name in ("weight", A, B))
    expected = weight + KEYS["alpha"] / KEYS["rank"] * b @ a
    assert found[f"{layer}.weight"].dtype == torch.bfloat16 and (expected - weight).abs().max() > 1e-5
    for dtype in (None, torch.float32, torch.float16):
        exported = Exported(Stored(source), dtype, named="tests.tiny").read_tensor("layers.0.attention.wq.weight")
        assert exported.dtype == (dtype or torch.bfloat16)
        torch.testing.assert_close(exported.double(), expected, rtol=torch.finfo(exported.dtype).eps, atol=1e-7)
    opened = titanlite.Run(tmp_path).model(name="tests.tiny").layers["0"].attention.wq.weight  # in float32: not rounded at all
    weight, a, b = (found[f"{layer}.{name}"].float() for name in ("weight", A, B))
    assert torch.equal(opened, torch.addmm(weight, b, a, alpha=KEYS["alpha"] / KEYS["rank"]))
