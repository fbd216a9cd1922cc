"""bfloat16 parameters and moments, and float8, on meshes. test_variants.py resumes."""

from typing import Any

import pytest
import torch

from tests.distributed.as_one import as_one_process
from tests.distributed.scenarios import CPU, config_of, mesh_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, run, stored
from titanlite.checkpoint.whole import Stored
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.hf.export import Exported
from titanlite.loop.memory import held_memory
from titanlite.loop.step import build_model
from titanlite.optim.build import build_optimizer
from titanlite.parallel.mesh import ranks_of
from titanlite.plan.predict import predict
from titanlite.registry.family import load_family
from titanlite.verify.compare import compare

HERE, GIVEN = "tests.distributed.test_low_precision", "tests.distributed.scenarios:given_gradients"
TP = {"tp": 2}
BFLOAT16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}


def keys(rounding: str, implementation: str = "for-loop") -> dict:
    return {"training": BFLOAT16, "optimizer": {"rounding": rounding, "implementation": implementation}}


@pytest.mark.parametrize(("rounding", "flavor"), [("stochastic", "tied"), ("compensated", "uneven")])
def test_the_same_gradients_give_the_same_parameters_and_moments_bit_for_bit(pools, rounding, flavor):
    expected = pools[1].run(GIVEN, degrees=ONE, config=config_of(ONE, flavor, **keys(rounding)), steps=4)[0]
    assert {tensor.dtype for tensor in expected.values()} <= {torch.bfloat16, torch.int32, torch.float32}
    assert not torch.equal(expected["layers.0.ffn.w1.weight"], expected["layers.0.ffn.w1.weight at first"])
    for degrees in (TWO_BY_TWO, {"dp_replicate": 2, "dp_shard": 2}):
        config = config_of(degrees, flavor, **keys(rounding))
        for found in pools[ranks_of(degrees)].run(GIVEN, degrees=degrees, config=config, steps=4):
            assert found.keys() == expected.keys()
            assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == [], degrees


@pytest.mark.slow
def test_compiled_kernels_on_shards_give_the_same_values(pools):
    config = config_of(TP, **keys("stochastic", "fused"))
    found = pools[2].run(GIVEN, degrees=TP, config=config, steps=2)[0]
    expected = pools[1].run(GIVEN, degrees=ONE, config=config_of(ONE, **keys("stochastic")), steps=2)[0]
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_initial_weights_are_those_of_float32_rounded(pools):
    wide = config_of(ONE)
    expected = pools[1].run(GIVEN, degrees=ONE, config=wide, steps=0)[0]
    found = pools[1].run(GIVEN, degrees=ONE, config=config_of(ONE, **keys("stochastic")), steps=0)[0]
    names = [name for name in expected if name.endswith("at first")]
    assert names
    for name in names:
        assert torch.equal(found[name], expected[name].bfloat16()), name


# ------------------------------------------------------------------------------------------------------------- whole runs


def test_a_bfloat16_checkpoint_is_exported_unchanged(pools, tmp_path):
    run(pools, {"dp_shard": 2}, tmp_path, 5, **keys("stochastic"))
    exported = Exported(Stored(tmp_path / "checkpoint/step-00000005"), named="tests.tiny")
    assert {exported.dtype_of(name) for name in exported.shapes} == {torch.bfloat16}
    for name in exported.shapes:
        assert torch.equal(exported.read_tensor(name), stored(tmp_path, 5)[f"model.{name}"]), name


def test_a_run_rounds_the_float32_checkpoint_that_it_starts_from(pools, tmp_path):
    run(pools, ONE, tmp_path / "wide", 5)
    source = {"initial_load_path": str(tmp_path / "wide/checkpoint/step-00000005")}
    tiny = {"training": BFLOAT16, "optimizer": {"lr": 1e-20, "implementation": "for-loop"}}
    run(pools, TP, tmp_path / "narrow", 5, checkpoint=source, **tiny)
    before, after = stored(tmp_path / "wide", 5), stored(tmp_path / "narrow", 5)
    for name in (name for name in before if name.startswith("model.")):
        assert torch.equal(after[name], before[name].bfloat16()), name


# ----------------------------------------------------------------------------------------------------------------- memory


def held(degrees: dict[str, int], config: Config) -> tuple[int, int]:
    """Bytes of parameters and of the optimizer's state on this rank."""
    model = build_model(load_family("tests.tiny", config.model.flavor), config, mesh_of(degrees), CPU)
    optimizer = build_optimizer(model, config.optimizer)
    memory = held_memory(model, optimizer, CPU)
    counts = 4 * sum(p.requires_grad for p in model.parameters())
    return memory["parameters"], memory["optimizer state"] - counts


@pytest.mark.skipif(BEFORE_2_13, reason="a prediction with bfloat16 needs PyTorch 2.13")
def test_the_estimate_equals_the_bytes_held(pools):
    config = config_of(TWO_BY_TWO, parallelism={"tensor_parallel_degree": 2}, **keys("compensated"))
    found = pools[4].run(f"{HERE}:held", degrees=TWO_BY_TWO, config=config)[0]
    memory = predict(config, 4).during("update")
    assert (memory.masters, memory.moments) == found
    assert memory.gradients == memory.masters
    assert memory.moments == 3 * memory.masters  # two of AdamW and the compensation


# ----------------------------------------------------------------------------------------------------------------- float8


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "2 x 2": (TWO_BY_TWO, {}),
    "tp 2, rows": (TP, {"recipe_name": "rowwise"}),
    "2 x 2, rows and whole gradients": (TWO_BY_TWO, {"recipe_name": "rowwise_with_gw_hp"}),
    "hybrid, float8 gather": ({"dp_replicate": 2, "dp_shard": 2}, {"enable_fsdp_float8_all_gather": True}),
}


# test_cover.py tolerates a value that rounds to a neighbor; none does here
@pytest.mark.parametrize("name", CASES)
def test_in_float8_a_mesh_gives_the_losses_and_gradients_of_one_process(pools, name):
    pytest.importorskip("torchao", reason="needs torchao")
    degrees, keys = CASES[name]
    float8 = {"enable": True, "emulate": True, **keys}
    both = as_one_process(pools, degrees, lambda mesh: config_of(mesh, training={"steps": 3}, float8=float8))
    assert compare(*both).worst("losses").size < 1e-6
