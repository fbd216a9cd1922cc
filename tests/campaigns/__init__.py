"""Long proofs, run by hand: `make campaign PART=...` writes a table (__main__.py).

Most of them start runs through run_train.sh as a user does, and disturb them.
tests/end_to_end/test_campaigns.py runs small ones.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.end_to_end.test_run_train import working_folder
from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import step_folder

_STEP = re.compile(r"step-(\d{8})")
NOT_RUN = "not run"  # the result of an item that this machine cannot run


class Report(NamedTuple):
    """The results of a campaign."""

    figures: dict[str, object]  # name -> value, in the order of the table
    broken: list[str]  # one sentence for each broken promise
    verdict: str = "good"  # where none is broken; or NOT_RUN


class Mesh(NamedTuple):
    """The mesh of a run: data-parallel shards x context parallel x tensor parallel x pipeline stages."""

    shards: int = 1
    context: int = 1
    tensor: int = 1
    stages: int = 1

    @property
    def ranks(self) -> int:
        return self.shards * self.context * self.tensor * self.stages

    @property
    def words(self) -> list[str]:
        """The options of the command line."""
        dimensions = ("data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
        pairs = zip(dimensions, self, strict=True)
        return [word for name, degree in pairs for word in (f"--parallelism.{name}_degree", str(degree))]

    def __str__(self) -> str:
        names = ("{} shards", "context {}", "tp {}", "{} stages")
        return " x ".join(name.format(degree) for name, degree in zip(names, self, strict=True) if degree > 1) or "1 rank"

    @classmethod
    def of(cls, text: str) -> "Mesh":
        """Parses "4" or "2x1x1x2"; missing degrees are 1."""
        return cls(*map(int, text.split("x")))


def run_folder(folder: Path, more: str = "") -> Path:
    """A new folder for a run of the end-to-end tests, with more code at the end of its model."""
    folder.mkdir()
    with open(working_folder(folder) / "own/model.py", "a") as file:
        file.write(more)
    return folder


class Step(NamedTuple):
    """The results of a step."""

    loss: float
    grad_norm: float


def trajectory(run: Path) -> dict[int, Step]:
    """step -> its results, as reported in a run's folder. An incomplete line does not count."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {entry["step"]: Step(entry["loss"], entry["grad_norm"]) for entry in entries}


def tensor_sums(run: Path, step: int) -> dict[str, str]:
    """file -> checksum, of the tensors in a checkpoint."""
    files = manifest.read(step_folder(run / "checkpoint", step)).files
    return {name: contents.xxh3_128 for name, contents in files.items() if name.endswith(".distcp")}


def committed(run: Path) -> set[int]:
    """The steps of the complete checkpoints in a run's folder."""
    folder = run / "checkpoint"
    return {int(match[1]) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))}


def starts(run: Path) -> list[int]:
    """The step from which each start that reached training continued."""
    path = run / "provenance.json"
    return [entry["resumed_step"] for entry in json.loads(path.read_text())] if path.exists() else []
