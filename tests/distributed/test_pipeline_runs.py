"""Whole runs with stages: checkpoints from and to other meshes, random numbers, reports, and Hugging Face's files."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import hf_folders
from tests.distributed.checkpoint_runs import HERE as RUNS
from tests.distributed.checkpoint_runs import assert_same, train
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU
from tests.distributed.test_resume import ONE, STEPS, Degrees, losses, reports, run, run_config, stored
from tests.hf_folders import of_files, tensors_of
from tests.repetitions import slow_but
from titanlite.checkpoint import manifest
from titanlite.hf import export as exporting
from titanlite.loop import metrics
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import load_family

HERE = "tests.distributed.test_pipeline_runs"
STAGES: Degrees = {"pp": 2}
SHARD: Degrees = {"pp": 2, "dp_shard": 2}
LOCAL = {"training": {"local_batch_size": 2}}
# What a chain of meshes moves; each mesh reads what the one before it has written.
CHAINS: dict[str, tuple[dict[str, Any], list[Degrees]]] = {
    "tied": (
        {"flavor": "tied", "model": {"overrides": {"n_layers": 4}}},
        [{"tp": 2}, {"pp": 4}, {"cp": 2}, {"pp": 2, "tp": 2}, {"dp_replicate": 2}, {"pp": 2, "cp": 2}, ONE, SHARD],
    ),
    "uneven": ({"flavor": "uneven"}, [{"pp": 2, "tp": 2}, ONE, STAGES, {"dp_shard": 4}, {"pp": 2, "dp_replicate": 2}]),
    "mixture": (
        {"flavor": "shared", "model": {"name": "tests.tiny_moe"}},
        [{"tp": 2, "ep": 2}, {**SHARD, "ep": 2}, ONE, {"pp": 2, "tp": 2, "ep": 2}, STAGES],
    ),
}


@pytest.mark.parametrize("chain", slow_but(["tied"], CHAINS))
def test_between_stages_and_other_meshes_a_checkpoint_is_loaded_bit_for_bit(pools, tmp_path, chain):
    keys, meshes = CHAINS[chain]
    before = tmp_path / "0"
    assert train(pools, SHARD, before, 2, **keys, **LOCAL)[0].error == ""
    expected = stored(before, 2)
    for number, degrees in enumerate(meshes, 1):
        source, after = before / "checkpoint/step-00000002", tmp_path / str(number)
        config = run_config(degrees, after, 2, **keys, **LOCAL)
        place = {"source": source, "folder": after / "checkpoint"}
        pools[ranks_of(degrees)].run(f"{RUNS}:move", degrees=degrees, config=config, **place)
        found = stored(after, 2)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], degrees
        before = after


def test_a_run_goes_on_between_stages_schedules_and_other_meshes_within_rounding(pools, tmp_path):
    run(pools, ONE, tmp_path / "whole", STEPS, flavor="deep")
    segments: list[tuple[Degrees, int, dict[str, Any]]] = [
        (SHARD, 3, {}),
        ({"tp": 2}, 5, {}),
        ({"pp": 4}, 7, {}),
        (STAGES, 9, {"pipeline_parallel_schedule": "Interleaved1F1B"}),
        (STAGES, STEPS, {"pipeline_parallel_layers_per_stage": 3}),
    ]
    for degrees, steps, keys in segments:
        more = {"training": {"local_batch_size": 8 // ranks_of(degrees)}, "parallelism": keys}
        run(pools, degrees, tmp_path / "parts", steps, flavor="deep", **more)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.parametrize("degrees", slow_but(["pp 2"], meshes := {"pp 2": STAGES, "pp 2 x shard 2": SHARD}))
def test_stages_that_draw_random_numbers_resume_bit_for_bit(pools, tmp_path, degrees):
    own: dict[str, Any] = {"model": {"name": "tests.tiny_block_dropout"}}
    run(pools, meshes[degrees], tmp_path / "whole", STEPS, **own, **LOCAL)
    for steps in (4, STEPS):
        run(pools, meshes[degrees], tmp_path / "parts", steps, **own, **LOCAL)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    run(pools, meshes[degrees], tmp_path / "without", STEPS, **LOCAL)
    assert losses(tmp_path / "without") != losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_with_split_experts_and_stages_resumes_bit_for_bit(pools, tmp_path):
    degrees, keys = {**SHARD, "ep": 2}, {"model": {"name": "tests.tiny_moe"}, "moe": {"balance_loss": 0.01}}
    for steps in (2, 4):
        assert train(pools, degrees, tmp_path / "parts", steps, **keys, **LOCAL)[0].error == ""
    assert train(pools, degrees, tmp_path / "whole", 4, **keys, **LOCAL)[0].error == ""
    assert_same(tmp_path / "parts", tmp_path / "whole", 4)


# ----------------------------------------------------------------------------------------------------------------- reports


def test_reports_are_those_of_one_process(pools, tmp_path):
    """Loss, norm, rate, tokens, validation, the loads of all layers' experts; speed and memory are there too."""
    keys = {"model": {"name": "tests.tiny_moe"}, "flavor": "shared", "moe": {"bias_update_speed": 0.01}}
    more = {"training": {"local_batch_size": 2, "z_loss": 1e-3}, "validation": {"enable": True, "freq": 2, "steps": 2}}
    for degrees in (ONE, STAGES):
        run(pools, degrees, tmp_path / str(len(degrees)), 2, **keys, **more)
    alone, split = (reports(tmp_path / name) for name in "01")
    own = ("tokens_per_second", "tokens_per_second_per_device", "data_wait_fraction", "peak_memory_gib")
    for expected, found in zip(alone, split, strict=True):
        assert found.keys() == expected.keys() and {"expert_load/1", "loss_mean", "grad_norm"} <= found.keys()
        same = [name for name in expected if name not in own and not name.endswith("_seconds")]
        assert {name: found[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-5)
        assert found["tokens_per_second_per_device"] == pytest.approx(found["tokens_per_second"] / 2)
    assert "validation_loss" in split[-1]


def memory_of_ranks() -> float:
    rank = torch.distributed.get_rank()
    with patch.object(metrics, "peak_memory_gib", lambda _: 1.0 + rank):
        return metrics.largest_peak_gib(CPU)


def test_the_memory_that_is_reported_is_that_of_the_rank_with_most(pools: dict[int, Pool]):
    assert pools[2].run(f"{HERE}:memory_of_ranks") == [2.0, 2.0]


# ------------------------------------------------------------------------------------------------- Hugging Face's format

SOURCES = {"tied": ("tests.tiny", "tied"), "untied": ("tests.tiny", "plain"), "mixture": ("tests.tiny_qwen3_moe", "plain")}


@pytest.mark.parametrize("source", slow_but(["tied"], SOURCES))
def test_a_run_with_stages_begins_from_a_folder_and_its_export_is_the_checkpoint(pools, tmp_path, monkeypatch, source):
    name, flavor = SOURCES[source]
    folder = hf_folders.write(tmp_path / "source", name, flavor, torch.bfloat16)
    start = {"initial_load_path": str(folder), "initial_load_in_hf": True}
    still = {"optimizer": {"lr": 1e-20, "weight_decay": 0.0}, "model": {"name": name, "hf_assets_path": str(folder)}}
    outcome = train(pools, STAGES, tmp_path / "run", 2, flavor=flavor, checkpoint=start, **still, **LOCAL)[0]
    assert outcome.error == "" and f"weights read from {folder}" in outcome.log
    there, module = tensors_of(folder), load_family(name, flavor).module
    trained = {key.removeprefix("model."): value for key, value in stored(tmp_path / "run", 2).items() if key[:6] == "model."}
    assert trained
    for ours, tensor in trained.items():
        assert torch.equal(tensor, of_files(module, ours, tensor, there).float()), ours
    checkpoint = tmp_path / "run/checkpoint/step-00000002"
    of_the_run = manifest.read(checkpoint).numbers["data"]["tokenizer"]  # of tokens that no tokenizer has made
    monkeypatch.setattr(exporting, "tokenizer_digest", lambda _: of_the_run)
    exporting.export(checkpoint, tmp_path / "out", named=name)
    exported = tensors_of(tmp_path / "out")
    assert exported.keys() == there.keys()
    assert all(torch.equal(exported[key], there[key].float()) for key in there)
