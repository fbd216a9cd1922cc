"""Reading checkpoints: which one is sound, and its tensors onto the mesh that there is, whatever mesh wrote them."""

import fnmatch
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, step_folder, step_of
from titanlite.checkpoint.manifest import Damaged, Manifest
from titanlite.checkpoint.storage import Reader, read_metadata
from titanlite.errors import UserError

log = logging.getLogger(__name__)


def newest_sound(folder: Path) -> tuple[Path, Manifest] | None:
    """(step folder, manifest) of the newest checkpoint that is what was written; None where there is none.

    All ranks together. Damaged ones are named in the log. Raises UserError where there are checkpoints and all are damaged.
    """
    steps = [list_steps(folder)]
    dist.broadcast_object_list(steps)  # of rank 0, which may see a folder a moment before the others do
    faults = []
    for step in reversed(steps[0]):
        source = step_folder(folder, step)
        try:
            return source, verified(source)
        except Damaged as error:
            faults.append(str(error))
            if dist.get_rank() == 0:  # all have found the same
                log.warning("not used: %s", error)
    if faults:
        raise UserError(
            f"{folder}: all {len(faults)} checkpoints are damaged, the newest is: {faults[0]}\n"
            "Restore one from a copy, or rename the folder to start anew"
        )
    return None


def verified(source: Path) -> Manifest:
    """The manifest of a checkpoint whose files have all been read and found to be what was written.

    All ranks together, each reads its share. Raises Damaged, on all ranks, which says what is wrong with which file, and
    UserError for a checkpoint of another version of titanlite.
    """
    found, fault = None, None
    try:
        found = manifest.read(source)
        if step_of(source) not in (None, found.numbers["step"]):  # None: the user's own name for a copy
            raise Damaged(f"{source / manifest.FILE}: is damaged: it belongs to step {found.numbers['step']}")
        if damage := "\n".join(faults(source, found, dist.get_rank(), dist.get_world_size())):
            raise Damaged(damage)
        read_metadata(source, found.files)
    except UserError as error:
        fault = error
    _raise_together(fault)
    assert found is not None
    return found


def _raise_together(fault: UserError | None) -> None:
    """Raises, on all ranks, what some of them have met: otherwise those would be missing in the next collective."""
    every: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (isinstance(fault, Damaged), str(fault)) if fault else None)
    if met := list(dict.fromkeys(filter(None, every))):
        kind = Damaged if all(damaged for damaged, _ in met) else UserError
        raise kind("\n".join(text for _, text in met))


def faults(source: Path, found: Manifest, part: int = 0, parts: int = 1) -> Iterator[str]:
    """What is wrong with the files of a checkpoint; of every `parts`-th file, from number `part` on, the largest first."""
    by_size = sorted(found.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, contents in by_size[part::parts]:
        if fault := manifest.fault(source, name, contents):
            yield fault


def load_tensors(
    source: Path, found: Manifest, tensors: dict[str, Tensor], exclude: Sequence[str] = (), prefix: str = ""
) -> None:
    """Reads a checkpoint's values into `tensors`, in place; all ranks together.

    exclude: patterns of names that are left as they are. prefix: of the checkpoint, only names that begin like this count.
    Raises UserError that lists every tensor which the checkpoint lacks, has besides, or holds in another shape.
    """
    fault, every = None, {}
    try:
        every = read_metadata(source, found.files).state_dict_metadata
    except Damaged as error:  # since it was verified
        fault = error
    _raise_together(fault)
    stored = {name: entry for name, entry in every.items() if name.startswith(prefix)}
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in [*stored, *tensors]):
            whose = f"{source} or of this run" if not prefix else f"{source} that is loaded, which are its weights alone"
            raise UserError(f'checkpoint.exclude_from_loading: "{pattern}" matches no tensor of {whose}')

    def counts(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    wanted = {name: tensor for name, tensor in tensors.items() if counts(name)}
    if problems := list(_misfits(wanted, {name: entry for name, entry in stored.items() if counts(name)})):
        raise UserError(
            "\n".join(
                [
                    f"{source}: does not fit this run:",
                    *problems,
                    "What is to keep its initial value, or to be left out, can be named in checkpoint.exclude_from_loading",
                ]
            )
        )
    try:
        dcp.load(wanted, storage_reader=Reader(source, found.files))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise Damaged(str(cause) if isinstance(cause, Damaged) else f"{source}: cannot be read: {cause!r}") from error


def _misfits(wanted: dict[str, Tensor], stored: dict[str, TensorStorageMetadata]) -> Iterator[str]:
    for name, tensor in wanted.items():
        if name not in stored:
            yield f"  {name}: not in the checkpoint"
        elif tuple(stored[name].size) != tuple(tensor.shape):
            yield f"  {name}: {tuple(stored[name].size)} in the checkpoint, {tuple(tensor.shape)} here"
    for name in sorted(stored.keys() - wanted.keys()):
        yield f"  {name}: in the checkpoint, not here"
