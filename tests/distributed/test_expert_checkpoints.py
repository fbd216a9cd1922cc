"""Checkpoints of runs whose experts are split over ranks: any mesh reads them, and a run resumes bit for bit; Hugging Face's
format from and to such a mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import hf_folders
from tests.distributed.checkpoint_runs import HERE, assert_same, train
from tests.distributed.mixtures import MODELS
from tests.distributed.test_resume import ONE, STEPS, Degrees, losses, run, run_config, stored
from tests.hf_folders import of_files, tensors_of
from tests.repetitions import slow_but
from titanlite.checkpoint import manifest
from titanlite.hf import export as exporting
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import load_family

SPLIT: Degrees = {"dp_shard": 2, "ep": 2}
WIDE: Degrees = {"dp_shard": 2, "tp": 2, "ep": 4}
MIXTURE: dict[str, Any] = {"model": {"name": "tests.tiny_moe"}}
# Each reads what the one before it has written.
MESHES: list[Degrees] = [
    ONE,
    {"tp": 2, "ep": 2},
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 4},
    WIDE,
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 4, "ep": 4},
    {"cp": 2, "tp": 2, "ep": 4},
    SPLIT,
    ONE,
    {"dp_shard": 2, "tp": 2, "ep": 2},
]


@pytest.mark.parametrize("family", slow_but(["shared"], ["plain", "shared", "grouped", "gpt_oss"]))
def test_between_degrees_and_one_process_a_checkpoint_is_loaded_bit_for_bit(pools, tmp_path, family):
    before, (name, flavor) = tmp_path / "0", MODELS.get(family, ("tests.tiny_moe", family))
    model = {"model": {"name": name}, "flavor": flavor}
    assert train(pools, SPLIT, before, 2, **model)[0].error == ""
    expected = stored(before, 2)
    assert expected["model.layers.0.ffn.experts.w1"].shape[0] == expected["model.layers.0.ffn.router.weight"].shape[0]
    for number, degrees in enumerate(MESHES, 1):
        source, after = before / "checkpoint/step-00000002", tmp_path / str(number)
        config = run_config(degrees, after, 2, **model)
        place = {"source": source, "folder": after / "checkpoint"}
        pools[ranks_of(degrees)].run(f"{HERE}:move", degrees=degrees, config=config, **place)
        found = stored(after, 2)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], degrees
        before = after


@pytest.mark.parametrize("degrees", slow_but(["shard 2, ep 2"], meshes := {"shard 2, ep 2": SPLIT, "2 x 2, ep 4": WIDE}))
def test_on_the_same_mesh_a_run_with_split_experts_resumes_bit_for_bit(pools, tmp_path, degrees):
    for steps in (2, 4):
        assert train(pools, meshes[degrees], tmp_path / "parts", steps, **MIXTURE)[0].error == ""
    assert train(pools, meshes[degrees], tmp_path / "whole", 4, **MIXTURE)[0].error == ""
    assert_same(tmp_path / "parts", tmp_path / "whole", 4)


def test_from_one_process_to_split_experts_and_back_the_losses_agree_within_rounding(pools, tmp_path):
    run(pools, ONE, tmp_path / "whole", STEPS, flavor="shared", **MIXTURE)
    for degrees, steps in ((ONE, 4), (SPLIT, 6), (WIDE, 8), (ONE, STEPS)):
        run(pools, degrees, tmp_path / "parts", steps, flavor="shared", **MIXTURE)
    differences = [abs(a / b - 1) for a, b in zip(losses(tmp_path / "parts"), losses(tmp_path / "whole"), strict=True)]
    print(f"losses differ by {max(differences):.1e}")
    assert max(differences) < 1e-5


QWEN = "tests.tiny_qwen3_moe"


def test_an_export_of_a_run_with_split_experts_has_every_expert_of_the_checkpoint(pools, tmp_path, monkeypatch):
    hf_folders.write(tmp_path / "source", QWEN, "plain")
    model = {"name": QWEN, "hf_assets_path": str(tmp_path / "source")}
    assert train(pools, SPLIT, tmp_path / "run", 2, model=model)[0].error == ""
    trained = {name: tensor for name, tensor in stored(tmp_path / "run", 2).items() if name.startswith("model.")}
    source = tmp_path / "run/checkpoint/step-00000002"
    of_the_run = manifest.read(source).numbers["data"]["tokenizer"]  # of tokens that no tokenizer has made
    monkeypatch.setattr(exporting, "tokenizer_digest", lambda _: of_the_run)
    exporting.export(source, tmp_path / "out", shard_bytes=100_000, named=QWEN)
    files, module = tensors_of(tmp_path / "out"), load_family(QWEN, "plain").module
    stacks = [name for name in trained if ".experts." in name]
    assert len(files) == len(trained) + sum(len(trained[name]) - 1 for name in stacks) and stacks
    for name, tensor in trained.items():
        assert torch.equal(of_files(module, name.removeprefix("model."), tensor, files), tensor), name


@pytest.mark.parametrize("degrees", [SPLIT, WIDE], ids=["shard 2, ep 2", "2 x 2, ep 4"])
def test_each_rank_reads_the_weights_of_its_own_experts_only(pools, tmp_path: Path, degrees):
    folder = hf_folders.write(tmp_path / "source", QWEN, "plain", torch.bfloat16)
    arguments = {"folder": folder, "name": QWEN, "flavor": "plain", "degrees": degrees}
    results = pools[ranks_of(degrees)].run("tests.distributed.test_hf:read", **arguments)
    files, module = tensors_of(folder), load_family(QWEN, "plain").module
    for name, found in results[0][0].items():
        assert torch.equal(found, of_files(module, name, found, files).float()), name
    assert [count for _, count, _ in results] == [own for _, _, own in results]
