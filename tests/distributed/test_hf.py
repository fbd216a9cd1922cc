"""Hugging Face's format on meshes: every rank reads only its own slices, and every mesh loads the same model."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests import hf_folders
from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import CPU, config_of, mesh_of
from tests.distributed.test_resume import EVERYTHING, ONE, TWO_BY_TWO, Degrees
from tests.hf_folders import CASES, tensors_of
from tests.quantized_files import write_float8
from titanlite.checkpoint.tensors import model_tensors
from titanlite.hf import export as exporting
from titanlite.hf import load
from titanlite.hf.entries import Entry
from titanlite.hf.folder import each_expert, find_weights, their_names
from titanlite.loop.step import build_model
from titanlite.registry.family import load_family
from titanlite.verify.compare import everywhere
from titanlite.verify.facts import stored_tensors_of

HERE = "tests.distributed.test_hf"
RANKS = {"one": (ONE, 1), "2 x 2": (TWO_BY_TWO, 4), "2 x 2 x 2": (EVERYTHING, 8), "shard 4": ({"dp_shard": 4}, 4)}
RANKS |= {"pp 2 x shard 2": ({"pp": 2, "dp_shard": 2}, 4), "pp 2 x tp 2": ({"pp": 2, "tp": 2}, 4)}
RANKS |= {"shard 2, ep 2": ({"dp_shard": 2, "ep": 2}, 2)}


# each model on the mesh that slices both dimensions, and in `make test-all` one model on each of the other meshes
_OTHERS = [mesh for mesh in RANKS if mesh not in ("2 x 2", "shard 2, ep 2")]
READ = [("tests.tiny_qwen3_moe", "plain", "shard 2, ep 2"), *((*case, "2 x 2") for case in CASES)]
READ += [pytest.param(*case, mesh, marks=pytest.mark.slow) for case, mesh in zip(CASES, _OTHERS, strict=False)]

# ------------------------------------------------------------------------------------------------------ what the ranks run


def read(folder: Path, name: str, flavor: str, degrees: Degrees) -> tuple[dict[str, Tensor], int, int]:
    """(full tensors on rank 0, values that this rank has read from the file, values of its own shards)."""
    config = config_of(degrees, flavor, degrees.get("pp", 1), model={"name": name, "flavor": flavor})
    family = load_family(name, flavor)
    model = build_model(family, config, mesh_of(degrees), CPU)
    mine, count, real = model_tensors(model), 0, load._slice

    def counted(entry: Entry, box: tuple[slice, ...]) -> Tensor:
        nonlocal count
        found = real(entry, box)
        count += found.numel()
        return found

    with patch.object(load, "_slice", counted):
        weights = find_weights(folder, family, family.on_meta() if "pp" in degrees else model)
        load.load_weights(mine, {name: entries for name, entries in weights.items() if name in mine})
    tensors = {name: tensor.detach() for name, tensor in stored_tensors_of(model).items()}
    own = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors.values())
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    whole = everywhere(model, whole)
    return (whole if dist.get_rank() == 0 else {}), count, own


def export_together(source: Path, output: Path, failing: int) -> None:
    """An export by all ranks; the disk of rank `failing` is full."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    group = dist.new_group(backend="gloo")
    with patch.object(exporting, "write_file", fail if dist.get_rank() == failing else exporting.write_file):
        exporting.export(source, output, shard_bytes=100_000, group=group, named="tests.tiny")


# --------------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize(("name", "flavor", "mesh"), READ)
def test_each_rank_reads_only_its_own_slices_of_the_file(pools, tmp_path, name, flavor, mesh):
    degrees, ranks = RANKS[mesh]
    folder = hf_folders.write(tmp_path / "source", name, flavor, torch.bfloat16)
    results = pools[ranks].run(f"{HERE}:read", folder=folder, name=name, flavor=flavor, degrees=degrees)
    tensors, file, module = results[0][0], tensors_of(folder), load_family(name, flavor).module
    names = their_names(load_family(name, flavor), tensors)
    assert {part.name for ours, tensor in tensors.items() for part in each_expert(names[ours], tensor.shape)} == file.keys()
    for ours, found in tensors.items():
        assert torch.equal(found, hf_folders.of_files(module, ours, found, file).float()), ours
    assert [count for _, count, _ in results] == [own for _, _, own in results]
    total = sum(tensor.numel() for tensor in tensors.values())
    assert ranks == 1 or max(count for _, count, _ in results) < 0.6 * total


def test_each_rank_dequantizes_only_its_own_slices(pools, tmp_path):
    """Slices of ranks begin within blocks of 16 x 24."""
    degrees, ranks = RANKS["2 x 2"]
    name, flavor = "tests.tiny_deepseek_v3", "plain"
    plain = hf_folders.write(tmp_path / "plain", name, flavor)
    values = write_float8(tmp_path / "float8", plain)
    results = pools[ranks].run(f"{HERE}:read", folder=tmp_path / "float8", name=name, flavor=flavor, degrees=degrees)
    module = load_family(name, flavor).module
    for ours, found in results[0][0].items():
        assert torch.equal(found, hf_folders.of_files(module, ours, found, values).float()), ours
    assert [count for _, count, _ in results] == [own for _, _, own in results]


def test_four_ranks_export_the_same_as_one_and_all_report_a_failed_rank(pools, tmp_path):
    folder = hf_folders.write(tmp_path / "source", "tests.tiny", "plain")
    pools[1].run("tests.hf_folders:import_here", source=folder, output=tmp_path / "weights", model="tests.tiny")
    with pytest.raises(WorkerFailure) as raised:
        pools[4].run(f"{HERE}:export_together", source=tmp_path / "weights", output=tmp_path / "out", failing=2)
    assert str(raised.value).count("UserError: " + str(tmp_path / "out") + ": cannot be written: ") == 4
    assert not (tmp_path / "out").exists()
    pools[4].run(f"{HERE}:export_together", source=tmp_path / "weights", output=tmp_path / "four", failing=-1)
    exporting.export(tmp_path / "weights", tmp_path / "one", shard_bytes=100_000, named="tests.tiny")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "four").iterdir()) == files and len(files) > 6
    assert all((tmp_path / "four" / name).read_bytes() == (tmp_path / "one" / name).read_bytes() for name in files)
