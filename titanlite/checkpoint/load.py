"""Finds intact checkpoints and loads their tensors onto any mesh, whatever mesh wrote them."""

import fnmatch
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, step_folder, step_of
from titanlite.checkpoint.manifest import Damaged, Manifest
from titanlite.checkpoint.storage import Reader, read_metadata, tensor_entries
from titanlite.ground.errors import UserError, listed, phase
from titanlite.ground.untrusted import Unread
from titanlite.launch.failure import ran_out
from titanlite.launch.process import of_first_rank, together

log = logging.getLogger(__name__)


def newest_sound(folder: Path) -> tuple[Path, Manifest] | None:
    """(step folder, manifest) of the newest intact checkpoint; None if there are no checkpoints. All ranks together.

    The log names each damaged checkpoint. Raises UserError if all are damaged, and Unread where the machine cannot read one: it
    may be sound, and the run does not go back for that.
    """
    steps = of_first_rank(list_steps(folder))  # on shared disks the other ranks may see a new folder later
    faults = []
    for step in reversed(steps):
        source = step_folder(folder, step)
        try:
            return source, verified(source)
        except Damaged as error:
            faults.append(str(error))
            if dist.get_rank() == 0:  # the error is the same on all ranks
                log.warning("not used: %s", error)
    if faults:
        remedy = "Restore one from a copy, or rename the folder to start from scratch"
        raise UserError(f"{folder}: all {len(faults)} checkpoints are damaged, the newest is: {faults[0]}\n{remedy}")
    return None


def verified(source: Path) -> Manifest:
    """The manifest of a checkpoint after all its files were read and compared with their checksums.

    All ranks together; each reads its share. Raises Damaged on all ranks, naming each damaged file, or UserError if another
    version of titanlite wrote the checkpoint.
    """
    with together():
        return intact(source, dist.get_rank(), dist.get_world_size())[0]


@phase("verifying the checkpoint")
def intact(source: Path, part: int = 0, parts: int = 1) -> tuple[Manifest, Metadata]:
    """Manifest and metadata of a checkpoint, after the files of one part (see `faults`) were compared with their checksums.

    Raises Damaged, naming each damaged file, or UserError if another version of titanlite wrote the checkpoint.
    """
    result = manifest.read(source)
    if step_of(source) not in (None, result.numbers["step"]):  # None: the user renamed a copy
        raise Damaged(f"{source / manifest.FILE}: is damaged: it belongs to step {result.numbers['step']}")
    if damage := "\n".join(faults(source, result, part, parts)):
        raise Damaged(damage)
    return result, read_metadata(source, result.files)


def faults(source: Path, found: Manifest, part: int = 0, parts: int = 1) -> Iterator[str]:
    """The damage of a checkpoint's files. Reads every `parts`-th file from number `part` on, in order of size."""
    by_size = sorted(found.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, contents in by_size[part::parts]:
        if fault := manifest.fault(source, name, contents):
            yield fault


@phase("loading the checkpoint")
def load_tensors(
    source: Path,
    saved: Manifest,
    tensors: dict[str, Tensor],
    exclude: Sequence[str] = (),
    prefix: str = "",
    elsewhere: Collection[str] = (),
) -> None:
    """Loads a checkpoint into `tensors`, in place. All ranks together.

    exclude: patterns of tensors that keep their values. prefix: ignores tensors of the checkpoint without this prefix.
    elsewhere: tensors that other ranks load, of other stages of a pipeline. Raises UserError that lists every tensor that is
    missing in the checkpoint, is only in the checkpoint, or has another shape there.
    """
    with together():  # it may have been damaged after it was verified
        metadata = read_metadata(source, saved.files)
    stored = {name: entry for name, entry in tensor_entries(metadata).items() if name.startswith(prefix)}
    targets, known = dict(tensors), {*stored, *tensors, *elsewhere}
    for pattern in exclude:
        names = fnmatch.filter(known, pattern)
        if not names:
            where = f"{source}, of which only the weights are loaded" if prefix else f"{source} or of this run"
            raise UserError(f'checkpoint.exclude_from_loading: "{pattern}" matches no tensor of {where}')
        for name in names:
            stored.pop(name, None)
            targets.pop(name, None)
    for name in {*elsewhere} - targets.keys():
        stored.pop(name, None)
    if mismatches := list(_mismatches(targets, stored)):
        remedy = "checkpoint.exclude_from_loading can list tensors that keep their initial values or are not loaded"
        raise UserError(listed(f"{source}: does not fit this run:", mismatches, remedy))
    try:
        dcp.load(targets, storage_reader=Reader(source, metadata))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, UserError):  # Damaged or Unread
            raise type(cause)(str(cause)) from error
        kind = Unread if ran_out(cause) or isinstance(cause, OSError) else Damaged
        raise kind(f"{source}: cannot be read: {cause!r}") from error


def _mismatches(targets: dict[str, Tensor], stored: dict[str, TensorStorageMetadata]) -> Iterator[str]:
    for name, tensor in targets.items():
        if name not in stored:
            yield f"{name}: not in the checkpoint"
        elif tuple(stored[name].size) != tuple(tensor.shape):
            yield f"{name}: {tuple(stored[name].size)} in the checkpoint, {tuple(tensor.shape)} here"
    for name in sorted(stored.keys() - targets.keys()):
        yield f"{name}: in the checkpoint, not here"
