"""P2: a resumed run is the uninterrupted run bit for bit. test_variants.py has what changes the state, and other meshes."""

import copy
import json
import shutil
import warnings
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import CPU, config_of, learnable_ids, mesh_of
from tests.token_files import mix_of, opened, write_file
from titanlite.config.schema import Config
from titanlite.data.mixture import Data
from titanlite.data.order import sample_at
from titanlite.data.samples import Arrays
from titanlite.parallel.mesh import ranks_of
from titanlite.train import train

Degrees = dict[str, int]
STEPS = 12  # of a whole run
ONE, TWO_BY_TWO = {}, {"dp_shard": 2, "tp": 2}
EVERYTHING = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


def run_config(degrees: Degrees, folder: Path, steps: int, **sections) -> Config:
    return config_of(
        degrees,
        sections.pop("flavor", "plain"),
        job={"dump_folder": str(folder)},
        training={"steps": steps, **sections.pop("training", {})},
        lr_scheduler={"total_steps": STEPS, **sections.pop("lr_scheduler", {})},
        metrics={"log_freq": 1, "enable_tensorboard": False},
        checkpoint={"enable": True, "interval": 5, "keep_latest_k": 2, **sections.pop("checkpoint", {})},
        **sections,
    )


def run(pools: dict[int, Pool], degrees: Degrees, folder: Path, steps: int, **sections) -> None:
    config = run_config(degrees, folder, steps, **sections)
    pools[ranks_of(degrees)].run("tests.distributed.scenarios:full_run", degrees=degrees, config=config)


def reports(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    assert [report["step"] for report in reports(folder)] == list(range(1, STEPS + 1))
    return [report["loss"] for report in reports(folder)]


def stored(folder: Path, step: int) -> dict[str, Tensor]:
    path = folder / f"checkpoint/step-{step:08d}"
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that this is one process
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def resumes_bit_for_bit(pools: dict[int, Pool], degrees: Degrees, folder: Path, **sections) -> dict[str, Tensor]:
    """A run without a stop in folder/whole, and one with two stops in folder/parts; returns the tensors of their end."""
    for name, ends in (("whole", [STEPS]), ("parts", [4, 8, STEPS])):
        for steps in ends:
            run(pools, degrees, folder / name, steps, **copy.deepcopy(sections))
    return assert_same_end(folder)


def resumes_once(pools: dict[int, Pool], degrees: Degrees, folder: Path, **sections) -> dict[str, Tensor]:
    """The same with one stop, and less to compute: folder/parts continues from a copy of the whole run's checkpoint."""
    run(pools, degrees, folder / "whole", STEPS, **copy.deepcopy(sections))
    shutil.copytree(folder / "whole", folder / "parts")
    shutil.rmtree(folder / f"parts/checkpoint/step-{STEPS:08d}")
    run(pools, degrees, folder / "parts", STEPS, **sections)
    return assert_same_end(folder)


def assert_same_end(folder: Path) -> dict[str, Tensor]:
    assert losses(folder / "parts") == losses(folder / "whole")
    return same_tensors(folder / "parts", folder / "whole", STEPS)


def same_tensors(found: Path, expected: Path, step: int) -> dict[str, Tensor]:
    """That the checkpoints of a step of two runs hold the same tensors, bit for bit; returns them."""
    here, there = stored(found, step), stored(expected, step)
    assert here.keys() == there.keys()
    assert [name for name in there if not torch.equal(here[name], there[name])] == []
    return here


@pytest.mark.parametrize(
    ("degrees", "flavor"),
    [(ONE, "tied"), (TWO_BY_TWO, "uneven"), ({"cp": 2}, "tied")],
    ids=["one process", "2 x 2", "context 2"],
)
def test_on_the_same_mesh_weights_moments_and_losses_are_equal_bit_for_bit(pools, tmp_path, degrees, flavor):
    found = resumes_bit_for_bit(pools, degrees, tmp_path, flavor=flavor)
    assert any(name.endswith("exp_avg_sq") for name in found)


def test_only_the_newest_checkpoints_are_kept_and_no_unfinished_one_is_left(pools, tmp_path):
    run(pools, ONE, tmp_path, STEPS)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-00000010", "step-00000012"]


def test_a_resume_ignores_an_unfinished_checkpoint(pools, tmp_path):
    run(pools, ONE, tmp_path, 10)
    (tmp_path / "checkpoint/step-00000010").rename(tmp_path / "checkpoint/.step-00000010.unfinished")
    run(pools, ONE, tmp_path, STEPS)
    assert [start["resumed_step"] for start in json.loads((tmp_path / "provenance.json").read_text())] == [0, 5]


def test_a_checkpoint_of_another_seed_or_model_is_refused(pools, tmp_path):
    """The rules are those of tests/unit/test_resume.py."""
    run(pools, ONE, tmp_path, 5)
    for change, message in (
        ({"training": {"seed": 1}}, r"training.seed = 1, was 0"),
        ({"flavor": "uneven"}, "vocab_size = 515"),
    ):
        with pytest.raises(WorkerFailure, match=message):
            run(pools, ONE, tmp_path, 10, **change)


def mixed_run(degrees: Degrees, config: Config, data: Data) -> list[tuple[str, int]]:
    """(source, sample) of every sample that this rank reads in a whole run."""
    rows, real = [], Data.read

    def read(self: Data, sources: np.ndarray, samples: np.ndarray, note: np.ndarray | None = None) -> Arrays:
        names = [self.sources[source].name for source in sources.tolist()]
        rows.extend(zip(names, samples.tolist(), strict=True))
        return real(self, sources, samples, note)

    with patch.object(Data, "read", read):
        train(config, data, None, mesh_of(degrees), CPU, 0.0)
    torch.distributed.barrier()
    return rows


def test_after_a_change_of_weights_each_source_continues_with_its_next_sample_on_other_ranks_too(pools, tmp_path):
    """The run, its checkpoints and its resumes; the rules are those of tests/unit/test_mixture.py."""
    numbers = {"a": 0, "b": 1}
    files = {name: write_file(tmp_path / name, [learnable_ids(510) + n]) for name, n in numbers.items()}  # 625 samples
    seen = defaultdict(list)
    phases = [(ONE, 5, (1, 1)), ({"dp_shard": 2}, 8, (9, 1)), (ONE, 10, (9, 1)), ({"dp_shard": 2}, STEPS, (1, 3))]
    for degrees, steps, weights in phases:
        config = run_config(degrees, tmp_path / "run", steps, checkpoint={"allow_changes": ["data"]})
        pairs = zip(files.items(), weights, strict=True)
        data = mix_of([opened(file, name, weight=weight) for (name, file), weight in pairs], config)
        arguments = {"degrees": degrees, "config": config, "data": data}
        ranks = pools[2 if degrees else 1].run("tests.distributed.test_resume:mixed_run", **arguments)
        per_step = [rows[at : at + 8 // len(ranks)] for at in range(0, len(ranks[0]), 8 // len(ranks)) for rows in ranks]
        for name, sample in (pair for part in per_step for pair in part):
            seen[name].append(sample)
    assert sum(map(len, seen.values())) == STEPS * 8
    for name, number in numbers.items():
        assert seen[name] == sample_at(np.arange(len(seen[name])), 625, f"0/{number}").tolist()
    assert len(losses(tmp_path / "run")) == STEPS
