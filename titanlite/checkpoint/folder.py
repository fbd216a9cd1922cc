"""The checkpoint folder of a run: names, the checkpoints in it, free disk space, retention and cleaning up."""

import contextlib
import itertools
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint import manifest
from titanlite.config.operation import Checkpoint
from titanlite.config.schema import Config
from titanlite.ground.errors import MachineFault, UserError
from titanlite.ground.files import replace_file, sync, writing
from titanlite.launch.process import of_first_rank, together

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_PROBE = ".probe"
_LEFTOVER = re.compile(r"\.step-(\d{8,})(-hf)?\.(unfinished|retired)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def export_folder(folder: Path, step: int) -> Path:
    """The folder for the weights of a step in Hugging Face's format. `step_of` does not take it for a checkpoint."""
    return folder / f"step-{step:08d}-hf"


def step_of(path: Path) -> int | None:
    """The step in a folder's name; None if the name is not a checkpoint's, for example after `clean_up` renamed it."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, oldest first. Their files are not verified."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(step for entry in entries if entry.is_dir() and (step := step_of(entry)) is not None)


# -------------------------------------------------------------------------------------------------------------- before a run


def disk_space_faults(folder: Path, size: int, cfg: Checkpoint) -> Iterator[str]:
    """A disk on which checkpoints of `size` bytes do not fit.

    Retention deletes an old checkpoint only after the new one is complete. A run therefore needs space for two, or for one if
    retention deletes one after the next save.
    """
    steps = list_steps(folder)
    needed = 1 if superfluous([*steps, max(steps, default=0) + cfg.interval], cfg) else 2
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free + sum(_size(path) for path in _leftovers(folder))  # clean_up deletes them
    if free < needed * size:
        room = f"{existing} has {_gib(free)} free, and {needed} checkpoints of this run need {_gib(needed * size)}"
        yield f'checkpoint.folder = "{cfg.folder}": {room}; free some space, or set job.dump_folder to another disk'


def _leftovers(folder: Path) -> list[Path]:
    """Folders that a killed run left half written or half deleted."""
    return [path for path in folder.glob(".step-*") if _LEFTOVER.fullmatch(path.name)]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def check_shared(folder: Path) -> None:
    """Writes and renames a small file in the checkpoint folder, and checks that all ranks can read it. All ranks together.

    A run thus fails at its start, not at its first checkpoint. Raises UserError.
    """
    token, probe = of_first_rank(secrets.token_hex(16)), folder / _PROBE
    with together():
        if dist.get_rank() == 0:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(probe, token)
                sync(folder)
    try:
        with together():
            seen = ""
            with contextlib.suppress(OSError):
                seen = probe.read_text()
            if seen != token:
                raise UserError(f"{folder}: {platform.node()} does not see what rank 0 writes; all nodes must share this disk")
    finally:
        if dist.get_rank() == 0:
            probe.unlink()


def clean_up(folder: Path, step: int) -> None:
    """Before a run continues from `step`: deletes leftovers of a killed run, and renames later checkpoints. All ranks together.

    A run that went back, by `load_step` or because a later checkpoint was damaged, must never resume from the abandoned steps.
    Their checkpoints and exports stay on the disk, as .aside-1, .aside-2, ...
    """
    if dist.get_rank() == 0:
        for path in _leftovers(folder):
            _delete(path)
        for path in sorted(folder.glob("step-*")):
            later = step_of(path.with_name(path.name.removesuffix("-hf")))
            if later is not None and later > step and path.is_dir():
                names = (path.with_name(f"{path.name}.aside-{n}") for n in itertools.count(1))
                aside = path.rename(next(name for name in names if not name.exists()))
                log.info("set aside %s: this run continues from step %d", aside, step)
    dist.barrier()


# ------------------------------------------------------------------------------------------------------------- after a save


def superfluous(steps: Iterable[int], cfg: Checkpoint) -> list[int]:
    """The checkpoints that retention deletes: all but the newest `keep_latest_k`, those that `keep_every_n_steps` keeps, and
    `load_step`."""
    if not cfg.keep_latest_k:
        return []
    return [
        step
        for step in sorted(steps)[: -cfg.keep_latest_k]
        if step != cfg.load_step and not (cfg.keep_every_n_steps and step % cfg.keep_every_n_steps == 0)
    ]


def retire(folder: Path, cfg: Checkpoint, run: str) -> None:
    """Deletes superfluous checkpoints; on one rank. Each is renamed first, so that a half deleted one is no checkpoint.

    run: as in manifests. A failure is logged: the save that has just been committed did not fail.
    """
    try:
        half_deleted = [path for path in _leftovers(folder) if path.suffix == ".retired"]
        superseded = [step_folder(folder, step) for step in superfluous(list_steps(folder), cfg)]
    except OSError as error:
        log.warning("%s: old checkpoints are not deleted: %s", folder, error)
        return
    for path in [*half_deleted, *superseded]:
        _delete(path, run)


def _delete(path: Path, run: str = "") -> None:
    """Deletes a checkpoint, or what a killed run has left of one.

    Only a folder with a sound manifest of its step and run, and nothing but the files that it lists, is a checkpoint; any other
    folder with the name of one is kept, with a warning.
    """
    try:
        if step_of(path) is not None:
            _check_is_ours(path, run)
            path = path.rename(path.with_name(f".{path.name}.retired"))
        shutil.rmtree(path)
    except (OSError, UserError) as error:  # this wastes disk space but loses no checkpoint; the next save tries again
        log.warning("%s: cannot be deleted: %s", path, error)


def _check_is_ours(path: Path, run: str) -> None:
    """Raises UserError for a folder that is no checkpoint of this run, or has other files too."""
    if path.is_symlink():
        raise UserError("it is a link")
    found = manifest.read(path)
    if found.numbers["step"] != step_of(path):
        raise UserError(f"its manifest is that of step {found.numbers['step']}")
    if run and (found.numbers.get("run") or run) != run:  # titanlite 0.2 named none
        raise UserError("it is of another run")
    if foreign := sorted(set(os.listdir(path)) - found.files.keys() - {manifest.FILE}):
        raise UserError(f"its manifest does not list {', '.join(foreign)}")


# ------------------------------------------------------------------------------------------------------------------ the check


def faults(config: Config) -> Iterator[str]:
    """What prevents a run from saving or resuming as configured."""
    cfg, folder = config.checkpoint, Path(config.job.dump_folder) / config.checkpoint.folder
    if not cfg.enable:
        return
    if cfg.load_step >= 0 and not step_folder(folder, cfg.load_step).is_dir():
        steps = ", ".join(map(str, list_steps(folder))) or "none"
        yield f"checkpoint.load_step = {cfg.load_step}: not in {folder}, which has: {steps}"
    if cfg.keep_latest_k and cfg.keep_every_n_steps % cfg.interval:
        kept = f"checkpoint.keep_every_n_steps = {cfg.keep_every_n_steps}"
        yield f"{kept}: must be a multiple of checkpoint.interval = {cfg.interval}, since only those steps are saved"
    if cfg.async_mode == "async_with_pinned_mem" and not torch.cuda.is_available():
        yield MachineFault('checkpoint.async_mode = "async_with_pinned_mem": only copies from a GPU gain by it; use "async"')
