"""Whole runs with features that change the state in a checkpoint: each resumes bit for bit, continues on other meshes, and any
mesh loads its checkpoint. test_resume.py has what is common to all runs.
"""

import shutil
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import hf_folders
from tests.distributed.checkpoint_runs import HERE as RUNS
from tests.distributed.checkpoint_runs import resumed, train
from tests.distributed.scenarios import CPU
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, Degrees, losses, reports, run, run_config, stored
from tests.hf_folders import of_files, tensors_of
from tests.repetitions import campaign_but
from titanlite.checkpoint import manifest
from titanlite.hf import export as exporting
from titanlite.loop import metrics
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import load_family

SHARD, TP, STAGES = {"dp_shard": 2}, {"tp": 2}, {"pp": 2}
FSDP_STAGES = {"pp": 2, "dp_shard": 2}
SPLIT, WIDE = {"dp_shard": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}
MUON = {"optimizer": {"name": "Muon", "implementation": "for-loop"}}  # the compiled one takes long to compile in every rank
LORA = {"lora": {"enable": True, "rank": 4, "alpha": 6.0}}
MOE = {"model": {"name": "tests.tiny_moe"}, "flavor": "shared", "moe": {"balance_loss": 0.01, "bias_update_speed": 0.01}}
FLOAT8 = {"float8": {"enable": True, "emulate": True, "enable_fsdp_float8_all_gather": True}}
DROPOUT = {"model": {"name": "tests.tiny_block_dropout"}, "training": {"local_batch_size": 2}}


def rounded(rounding: str) -> dict[str, Any]:
    training = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}
    return {"training": training, "optimizer": {"rounding": rounding, "implementation": "for-loop"}}


def odd(flavor: str) -> dict[str, Any]:
    return {"model": {"name": "tests.tiny_odd", "flavor": flavor}}


RESUMED: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "dropout, tp 2": (TP, {"model": {"name": "tests.tiny_dropout"}}),
    "frozen parameters, tp 2": (TP, odd("frozen")),
    "unused parameters, shard 2": (SHARD, odd("unused")),
    "a buffer that counts, 2 x 2": (TWO_BY_TWO, odd("counting")),
    "Muon, shard 2": (SHARD, MUON),
    "Muon, split experts": (SPLIT, MOE | MUON),
    "stochastic rounding": (ONE, rounded("stochastic")),
    "compensated rounding, tp 2": (TP, rounded("compensated")),
    "float16, tp 2": (TP, {"training": {"mixed_precision_param": "float16"}}),
    "float8 gather, shard 2": (SHARD, FLOAT8),
    "adapters, tp 2": (TP, LORA),
    "an EMA, shard 2": (SHARD, {"optimizer": {"ema_decay": 0.9}}),
    "stages that draw random numbers": (STAGES, DROPOUT),
    "split experts and stages": ({**FSDP_STAGES, "ep": 2}, MOE | {"training": {"local_batch_size": 2}}),
}
OFTEN = ("Muon, split experts", "compensated rounding, tp 2", "float16, tp 2", "float8 gather, shard 2", "adapters, tp 2")
OFTEN += ("an EMA, shard 2", "stages that draw random numbers")
LESS_OFTEN = ("dropout, tp 2", "a buffer that counts, 2 x 2", "stochastic rounding", "split experts and stages")


@pytest.mark.parametrize("name", campaign_but(OFTEN, LESS_OFTEN, RESUMED))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(pools, tmp_path, name):
    degrees, keys = RESUMED[name]
    if "float8" in name:
        pytest.importorskip("torchao", reason="needs torchao")
    folders = tmp_path / "whole", tmp_path / "parts"
    run(pools, degrees, folders[0], 8, **keys)
    shutil.copytree(*folders)
    shutil.rmtree(folders[1] / "checkpoint/step-00000008")
    run(pools, degrees, folders[1], 8, **keys)
    assert resumed(folders[1]) == [0, 5]
    whole, parts = map(reports, folders)
    for key in ("step", "loss", "grad_norm", "loss_scale", "skipped_steps"):
        assert [report.get(key) for report in parts[-3:]] == [report.get(key) for report in whole[-3:]]
    assert ("loss_scale" in whole[0]) == ("float16" in name)
    expected, found = (stored(folder, 8) for folder in folders)
    assert found.keys() == expected.keys()
    assert [each for each, tensor in expected.items() if not torch.equal(found[each], tensor)] == []
    assert whole[-1]["loss"] < whole[0]["loss"]


# A run on one process, its features, and the meshes of its parts: until which step, with which other keys. rel: of the losses.
MOVED: dict[str, tuple[float, dict[str, Any], list[tuple[Degrees, int, dict[str, Any]]]]] = {
    "uneven": (1e-5, {"flavor": "uneven"}, [(ONE, 4, {}), ({"cp": 2}, 6, {}), (TWO_BY_TWO, 8, {}), (ONE, STEPS, {})]),
    "compensated rounding": (5e-3, rounded("compensated"), [(ONE, 4, {}), (TWO_BY_TWO, 8, {}), (TP, STEPS, {})]),
    "adapters": (1e-5, LORA, [(TWO_BY_TWO, 6, {}), (ONE, STEPS, {})]),
    "Muon, split experts": (2e-5, MOE | MUON, [(SPLIT, 4, {}), (TWO_BY_TWO, 6, {}), (SHARD, 8, {}), (TP, STEPS, {})]),
    "stages": (
        1e-6,
        {"flavor": "deep"},
        [
            (FSDP_STAGES, 3, {}),
            (TP, 5, {}),
            ({"pp": 4}, 7, {}),
            (STAGES, 9, {"pipeline_parallel_schedule": "Interleaved1F1B"}),
            (STAGES, STEPS, {"pipeline_parallel_layers_per_stage": 3}),
        ],
    ),
}


@pytest.mark.parametrize("name", campaign_but(["stages"], ["Muon, split experts", "compensated rounding"], MOVED))
def test_runs_resumed_on_other_meshes_have_the_losses_of_one_process_within_rounding(pools, tmp_path, name):
    rel, keys, parts = MOVED[name]
    run(pools, ONE, tmp_path / "whole", STEPS, **keys)
    for degrees, steps, parallelism in parts:
        more = {}
        if name == "stages":
            more = {"training": {"local_batch_size": 8 // ranks_of(degrees)}, "parallelism": parallelism}
        run(pools, degrees, tmp_path / "parts", steps, **keys, **more)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=rel)


# The mesh that writes a checkpoint, and then meshes, each of which reads what the previous one has written.
CHAINS: dict[str, tuple[dict[str, Any], list[Degrees]]] = {
    "tied": (
        {"flavor": "tied", "model": {"overrides": {"n_layers": 4}}},
        [FSDP_STAGES, TP, {"pp": 4}, {"cp": 2}, {"dp_replicate": 2}, ONE, FSDP_STAGES],
    ),
    "uneven": (
        {"flavor": "uneven"},
        [FSDP_STAGES, ONE, TP, {"dp_shard": 4}, TWO_BY_TWO],
    ),
    "experts": (
        {"flavor": "shared", "model": {"name": "tests.tiny_moe"}},
        [SPLIT, ONE, {"tp": 2, "ep": 2}, {"dp_replicate": 2, **SPLIT}, {"pp": 2, "tp": 2, "ep": 2}, STAGES],
    ),
    "experts with biases": (
        {"flavor": "plain", "model": {"name": "tests.tiny_gpt_oss"}},
        [SPLIT, ONE, {"tp": 2, "ep": 2}, WIDE, {"cp": 2, "tp": 2, "ep": 4}, ONE],
    ),
}


@pytest.mark.parametrize("chain", campaign_but(["experts"], ["tied"], CHAINS))
def test_between_meshes_a_checkpoint_is_loaded_bit_for_bit(pools, tmp_path, chain):
    keys, (first, *meshes) = CHAINS[chain]
    local, before = {"training": {"local_batch_size": 2}}, tmp_path / "0"
    assert train(pools, first, before, 2, **keys, **local)[0].error == ""
    expected = stored(before, 2)
    assert ("model.head.output.weight" in expected) == (chain != "tied")
    for number, degrees in enumerate(meshes, 1):
        source, after = before / "checkpoint/step-00000002", tmp_path / str(number)
        config = run_config(degrees, after, 2, **keys, **local)
        place = {"source": source, "folder": after / "checkpoint"}
        pools[ranks_of(degrees)].run(f"{RUNS}:move", degrees=degrees, config=config, **place)
        found = stored(after, 2)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], degrees
        before = after


SOURCES = {
    "tied, stages": ("tests.tiny", "tied", STAGES),
    "split experts": ("tests.tiny_qwen3_moe", "plain", SPLIT),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_starts_from_a_hugging_face_folder_and_its_export_is_the_checkpoint(pools, tmp_path, monkeypatch, source):
    name, flavor, degrees = SOURCES[source]
    folder = hf_folders.write(tmp_path / "source", name, flavor, torch.bfloat16)
    start = {"initial_load_path": str(folder), "initial_load_in_hf": True}
    still = {"optimizer": {"lr": 1e-20, "weight_decay": 0.0}, "model": {"name": name, "hf_assets_path": str(folder)}}
    local = {"training": {"local_batch_size": 2}}
    outcome = train(pools, degrees, tmp_path / "run", 2, flavor=flavor, checkpoint=start, **still, **local)[0]
    assert outcome.error == "" and f"weights read from {folder}" in outcome.log
    there, module = tensors_of(folder), load_family(name, flavor).module
    trained = {key.removeprefix("model."): value for key, value in stored(tmp_path / "run", 2).items() if key[:6] == "model."}
    assert trained
    for ours, tensor in trained.items():
        assert torch.equal(tensor, of_files(module, ours, tensor, there).float()), ours
    checkpoint = tmp_path / "run/checkpoint/step-00000002"
    of_the_run = manifest.read(checkpoint).numbers["data"]["tokenizer"]  # the tokens come from no tokenizer
    monkeypatch.setattr("titanlite.data.sources.tokenizer_digest", lambda _: of_the_run)
    exporting.export(checkpoint, tmp_path / "out", shard_bytes=100_000, named=name)
    exported = tensors_of(tmp_path / "out")
    assert exported.keys() == there.keys()
    assert all(torch.equal(exported[key], there[key].float()) for key in there)


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


def test_the_reported_memory_is_that_of_the_rank_with_the_most(pools):
    assert pools[2].run(f"{__name__}:memory_of_ranks") == [2.0, 2.0]
