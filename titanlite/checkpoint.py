"""Checkpoints: DCP holds the tensors, state.json the numbers; a folder under its final name is complete.

    <folder>/step-00000100/state.json, .metadata, __0_0.distcp ...

Model and optimizer are stored by parameter name and as whole tensors cut into shards, so any mesh can read what another
one has written.
"""

import itertools
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.errors import UserError
from titanlite.loss_scale import LossScale
from titanlite.optimizer import named_state

log = logging.getLogger(__name__)

_FORMAT = 1
_REMEDY = "remove or rename this folder, and the run resumes from the checkpoint before it"
_NAME = re.compile(r"step-(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, oldest first."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model under the names they have in a checkpoint; a tied one once."""
    persistent = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {f"model.{name}": tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}


def run_tensors(model: nn.Module, optimizer: Any, loss_scale: LossScale | None) -> dict[str, Tensor]:
    """Everything of a run that is a tensor: the parameters, the optimizer's moments, and in float16 the loss scale."""
    moments = {f"optimizer.{name}": tensor for name, tensor in named_state(optimizer, model).items()}
    return model_tensors(model) | moments | (loss_scale.tensors() if loss_scale else {})


def save(folder: Path, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], keep: int, protected: int = -1) -> None:
    """Writes a checkpoint under a temporary name, renames it once it is whole, then deletes all but the newest `keep`.

    All ranks call it together; every rank writes its own shards. keep: 0 keeps all. protected: a step that is never deleted.
    Raises UserError where it cannot be written; what was there before is untouched.
    """
    final = step_folder(folder, step)
    unfinished = folder / f".{final.name}.unfinished"
    try:
        if dist.get_rank() == 0:
            unfinished.mkdir(parents=True)
        dist.barrier()
        dcp.save(tensors, checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            with open(unfinished / "state.json", "w", encoding="utf-8") as file:
                json.dump({"format": _FORMAT, "step": step, **numbers}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(unfinished)
            unfinished.rename(final)  # a folder of that name is never there: see clean_up
            _sync_folder(folder)
            for old in list_steps(folder)[:-keep] if keep else []:
                if old != protected:
                    shutil.rmtree(step_folder(folder, old))
        dist.barrier()
    except (CheckpointException, OSError) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder).free / 2**30
        raise UserError(f"{final}: could not be saved, with {free:.2f} GiB free: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The last line of what a rank has met, without DCP's traceback around it."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def load_numbers(folder: Path) -> dict[str, Any]:
    """The contents of a checkpoint's state.json. Raises UserError for one that this version cannot read."""
    path = folder / "state.json"
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(numbers, dict) or numbers.get("format") != _FORMAT:
        raise UserError(f"{path}: is not of format {_FORMAT}, which this version reads")
    if lacking := [key for key in ("step", "samples", "data", "schedule", "config") if key not in numbers]:
        raise UserError(f"{path}: is damaged: it lacks {', '.join(lacking)}")
    return numbers


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Reads a checkpoint's values into `tensors`, in place; all ranks together.

    Raises UserError that lists every tensor which the checkpoint lacks or holds in another shape.
    """
    try:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise UserError(f"{folder}: not a checkpoint: there is no .metadata file in it") from None
    except Exception as error:  # unpickling a damaged file can raise anything
        raise UserError(f"{folder / '.metadata'}: is damaged: {error!r}; {_REMEDY}") from None
    faults = []
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            faults.append(f"  {name}: not in the checkpoint")
        elif tuple(entry.size) != tuple(tensor.shape):
            faults.append(f"  {name}: {tuple(entry.size)} in the checkpoint, {tuple(tensor.shape)} in the model")
    if faults:
        raise UserError("\n".join([f"{folder}: does not fit the model:", *faults]))
    try:
        dcp.load(tensors, checkpoint_id=folder)
    except CheckpointException as error:
        raise UserError(f"{folder}: is damaged: {_cause(error)}; {_REMEDY}") from error


def clean_up(folder: Path, step: int) -> None:
    """Before a run goes on from a step: deletes what a killed run has left unfinished, and renames later checkpoints.

    So a run that went back with `load_step` never resumes from its old future; what is set aside is kept, as .aside-1, -2.
    """
    if dist.get_rank() == 0:
        for left_over in folder.glob(".step-*.unfinished"):
            shutil.rmtree(left_over)
        for later in list_steps(folder):
            if later > step:
                path = step_folder(folder, later)
                aside = next(
                    name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.aside-{n}")).exists()
                )
                path.rename(aside)
                log.info("set aside %s: this run goes on from step %d", aside, step)
    dist.barrier()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
