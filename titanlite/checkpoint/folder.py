"""The folder of a run's checkpoints: names, what is there, room for more, what is kept and what is cleaned up."""

import contextlib
import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from titanlite.config.schema import Checkpoint as Keys
from titanlite.errors import UserError
from titanlite.files import sync

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_PROBE = ".probe"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder / f".step-{step:08d}.unfinished"


def export_folder(folder: Path, step: int) -> Path:
    """Where the weights of a step are in Hugging Face's format; its name is no checkpoint's."""
    return folder / f"step-{step:08d}-hf"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says; None where the name is no checkpoint's, such as that of one set aside."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, oldest first; some may have been damaged since."""
    inside = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return sorted(step for entry in inside if (step := step_of(entry)) is not None)


# -------------------------------------------------------------------------------------------------------------- before a run


def room_fault(folder: Path, size: int, keys: Keys) -> str:
    """What is wrong where checkpoints of `size` bytes will not fit on the disk, or nothing.

    While a checkpoint is written, those that it replaces are still there. So a run needs room for two, or for one where as
    many as are kept are there already.
    """
    lacking = keys.keep_latest_k + 1 - len(list_steps(folder)) if keys.keep_latest_k else 2
    needed = min(2, max(1, lacking))
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free + sum(_size(path) for path in _left_over(folder))  # which clean_up deletes
    if free >= needed * size:
        return ""
    return (
        f'checkpoint.folder = "{keys.folder}": {existing} has {_gib(free)} free, and {needed} checkpoints of this run need '
        f"{_gib(needed * size)}; make room, or name a folder of another disk in job.dump_folder"
    )


def _left_over(folder: Path) -> list[Path]:
    """What a killed run has left half written or half deleted."""
    return [*folder.glob(".step-*.unfinished"), *folder.glob(".step-*.retired")]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def try_out(folder: Path) -> None:
    """Writes, renames and removes a small file where checkpoints will go, and has all ranks see it; all ranks together.

    So a run finds out at its start, not at its first checkpoint, what it may not do. Raises UserError.
    """
    token = [""]
    fault = ""
    if dist.get_rank() == 0:
        try:
            token = [secrets.token_hex(16)]
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{_PROBE}.tmp", "w") as file:
                file.write(token[0])
                file.flush()
                os.fsync(file.fileno())
            (folder / f"{_PROBE}.tmp").rename(folder / _PROBE)
            sync(folder)
        except OSError as error:
            fault = f"{folder}: checkpoints cannot be written: {error}"
    dist.broadcast_object_list(token)
    if not fault:
        try:
            sees = (folder / _PROBE).read_text() == token[0]
        except OSError:
            sees = False
        if not sees:
            fault = f"{folder}: rank {dist.get_rank()} does not see what rank 0 writes there; all machines must share that disk"
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    if dist.get_rank() == 0:
        for name in (_PROBE, f"{_PROBE}.tmp"):
            with contextlib.suppress(OSError):  # where nothing could be written there is nothing to remove
                (folder / name).unlink()
    if first := next(filter(None, faults), ""):
        raise UserError(first)


def clean_up(folder: Path, step: int) -> None:
    """Before a run goes on from a step: deletes what a killed run has left unfinished, and renames later checkpoints.

    So a run that went back, with `load_step` or since a later checkpoint was damaged, never resumes from its old future. What
    is set aside is kept, as .aside-1, -2. All ranks together.
    """
    if dist.get_rank() == 0:
        for left_over in _left_over(folder):
            shutil.rmtree(left_over)
        for path in sorted(folder.glob("step-*")):
            later = step_of(path.with_name(path.name.removesuffix("-hf")))  # an export is of the same old future
            if later is not None and later > step and path.is_dir():
                aside = next(
                    name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.aside-{n}")).exists()
                )
                path.rename(aside)
                log.info("set aside %s: this run goes on from step %d", aside, step)
    dist.barrier()


# ------------------------------------------------------------------------------------------------------------- after a save


def superfluous(steps: Iterable[int], keys: Keys) -> list[int]:
    """Which checkpoints retention deletes: none of the newest `keep_latest_k`, of those that `keep_every_n_steps` keeps, and
    not the one that `load_step` names."""
    if not keys.keep_latest_k:
        return []
    return [
        step
        for step in sorted(steps)[: -keys.keep_latest_k]
        if step != keys.load_step and not (keys.keep_every_n_steps and step % keys.keep_every_n_steps == 0)
    ]


def retire(folder: Path, keys: Keys) -> None:
    """Deletes superfluous checkpoints; on one rank. What is half deleted has no final name any more."""
    left_over = folder.glob(".step-*.retired")
    for path in [*left_over, *(step_folder(folder, step) for step in superfluous(list_steps(folder), keys))]:
        try:
            shutil.rmtree(path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.retired")))
        except OSError as error:  # it costs room, no checkpoint; the next save tries again
            log.warning("%s: cannot be deleted: %s", path, error)
