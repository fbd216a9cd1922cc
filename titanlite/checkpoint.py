"""Checkpoints: DCP holds the tensors, state.json the numbers; a folder under its final name is complete.

    <folder>/step-00000100/state.json, .metadata, __0_0.distcp ...

Model and optimizer are stored by parameter name and as whole tensors cut into shards, so any mesh can read what another
one has written.
"""

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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.errors import UserError
from titanlite.optimizer import named_state

log = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, oldest first."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model under the names they have in a checkpoint; a tied one once."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def run_tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Everything of a run that is a tensor: the parameters and the optimizer's moments."""
    moments = {f"optimizer.{name}": tensor for name, tensor in named_state(optimizer, model).items()}
    return model_tensors(model) | moments


def save(folder: Path, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], keep: int) -> None:
    """Writes a checkpoint under a temporary name, renames it once it is whole, then deletes all but the newest `keep`.

    All ranks call it together; every rank writes its own shards. keep: 0 keeps all.
    """
    final = step_folder(folder, step)
    unfinished = folder / f".{final.name}.unfinished"
    if dist.get_rank() == 0:
        for left_over in folder.glob(".step-*.unfinished"):
            shutil.rmtree(left_over)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save(tensors, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        with open(unfinished / "state.json", "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "step": step, **numbers}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(final)  # a folder of that name is never there: see set_aside_later
        _sync_folder(folder)
        for old in list_steps(folder)[:-keep] if keep else []:
            shutil.rmtree(step_folder(folder, old))
    dist.barrier()


def load_numbers(folder: Path) -> dict[str, Any]:
    """The contents of a checkpoint's state.json. Raises UserError for one that this version cannot read."""
    path = folder / "state.json"
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if numbers.get("format") != _FORMAT:
        raise UserError(f"{path}: has format {numbers.get('format')!r}; this version reads format {_FORMAT}")
    return numbers


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Reads a checkpoint's values into `tensors`, in place; all ranks together.

    Raises UserError that lists every tensor which the checkpoint lacks or holds in another shape.
    """
    try:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise UserError(f"{folder}: not a checkpoint: there is no .metadata file in it") from None
    faults = []
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            faults.append(f"  {name}: not in the checkpoint")
        elif tuple(entry.size) != tuple(tensor.shape):
            faults.append(f"  {name}: {tuple(entry.size)} in the checkpoint, {tuple(tensor.shape)} in the model")
    if faults:
        raise UserError("\n".join([f"{folder}: does not fit the model:", *faults]))
    dcp.load(tensors, checkpoint_id=folder)


def set_aside_later(folder: Path, step: int) -> None:
    """Renames the checkpoints after a step, so that a run which goes on from there never resumes from its old future."""
    if dist.get_rank() == 0:
        for later in list_steps(folder):
            if later > step:
                path = step_folder(folder, later)
                aside = next(name for n in range(1, 10**6) if not (name := path.with_name(f"{path.name}.aside-{n}")).exists())
                path.rename(aside)
                log.info("set aside %s: this run goes on from step %d", aside, step)
    dist.barrier()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
