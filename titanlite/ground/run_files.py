"""The files in a run's folder, for all that read them: their names, and the schemas of their lines.

Nothing here needs torch: to compare runs, their folders are enough.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import MIB, Absent, Count, FileSchema, Pair, Positive, Unread, read_json, read_lines

# Names in the folder of a run. Rank 0 writes them, but for stacks and traces: each rank, and the launcher, has a file there.
LOCK = ".lock"  # the process that trains; also in the folder of checkpoints; both stay locked
CONFIG = "config.toml"  # the resolved configuration of the latest start
PROVENANCE = "provenance.json"  # an entry for each start: command, git commit and diff, versions, mesh, data
METRICS = "metrics.jsonl"  # an object for each reported step
ASIDE = "metrics.jsonl.aside"  # reports of steps that a later start, or a rollback, has repeated
INCIDENTS = "incidents.jsonl"  # an object for each spike and each step that was not finite
STACKS = "stacks"  # where ranks were when something went wrong
COLLECTIVES = "comm_traces"  # NCCL's flight recorder

_LIMIT = 2048 * MIB  # of provenance.json: a thousand starts, each with 100 KiB of changed code


class _Report(FileSchema):
    """What a line of metrics.jsonl must hold; null is a number that is not finite, or the loss of no labels."""

    step: Count
    loss: float | None = None
    grad_norm: float | None = None


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where there is no such file. Raises UserError."""
    return _read_lines(path, _Report)


class _Entry(FileSchema):
    """What a line of incidents.jsonl must hold."""

    kind: Literal["spike", "nonfinite"]
    step: Count
    samples: Pair
    action: str
    superseded: bool


class _RollbackEntry(_Entry):
    kind: Literal["rollback"]  # type: ignore[assignment]  # another value than those of the others
    found_at: Count
    to_step: Count
    next_sample: Count


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The lines of an incidents.jsonl, oldest first. Raises UserError for a line that this version does not write."""
    return _read_lines(path, Annotated[_Entry | _RollbackEntry, Field(discriminator="kind")])


class SourceSchema(FileSchema):
    name: str
    documents: Count
    tokens: Count
    fingerprint: str
    share: Annotated[float, Field(gt=0.0, le=1.0)]


class DataSchema(FileSchema):
    """The data of a run, in provenance.json and in the manifests of its checkpoints."""

    tokenizer: str
    beginning: str
    sources: list[SourceSchema]


class _Start(FileSchema):
    """What an entry of provenance.json must hold."""

    time: str
    command: list[str]
    global_batch: Positive | None = None
    resumed_step: Count = 0
    values: dict[str, Any] = Field(default={})
    data: DataSchema | None = None
    data_degree: Positive | None = None  # earlier versions have none
    compared: dict[str, Any] = Field(default={})  # with a replay; earlier versions have none
    teacher: str = ""
    loading: dict[str, Any] = Field(default={})  # with a replay too; earlier versions have none
    model_source: dict[str, Any] | None = None
    own_source: dict[str, Any] = Field(default={})  # earlier versions have none


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's provenance.json; none where there is no such file. Raises UserError."""
    try:
        return read_json(folder / PROVENANCE, list[_Start], _LIMIT)
    except Absent:
        return []


def _read_lines(path: Path, model: Any) -> list[dict[str, Any]]:
    """The objects of a .jsonl file of a run; none where there is no such file. Raises UserError for a line that is not one."""
    try:
        return list(read_lines(path, model))
    except Absent:
        return []
    except Unread:
        raise
    except UserError as error:
        raise UserError(f"{error}; remove the line, or rename the file") from None
