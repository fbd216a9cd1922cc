"""Where a run begins: at step 0, at the newest sound checkpoint, or as a branch of another run; which keys may have changed.

A resumed run must equal the uninterrupted one. Its configuration is compared with the stored one, key by key: most keys
change no later step, some do and must be allowed by name, a few cannot be combined with the old state.
"""

import difflib
import fnmatch
import itertools
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Checkpoint, Config
from titanlite.data.mixture import Data
from titanlite.errors import UserError
from titanlite.hf.folder import find_weights
from titanlite.hf.load import load_weights
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.lr_schedule import Schedule, build_schedule
from titanlite.optim.state import run_tensors
from titanlite.transforms.registry import Family, is_adapter

log = logging.getLogger(__name__)

# Keys that change no number of later steps, apart from rounding. Every other key changes the mathematics.
HARMLESS = (
    "job.*",
    "model.flavor",  # the dimensions are compared
    "model.attention",
    "model.hf_assets_path",  # text and tokenizer are compared by fingerprint
    "training.dataset",
    "training.dataset_path",
    "training.sources",  # weights are compared as shares of all samples
    "dataloader.*",
    "training.local_batch_size",
    "training.steps",
    "training.on_nonfinite",
    "training.gc_freq",
    "training.deterministic",
    "parallelism.*",
    "activation_checkpoint.*",
    "compile.*",
    "optimizer.implementation",
    "float8.emulate",
    "checkpoint.*",
    "metrics.*",
    "profiling.*",
    "comm.*",
    "validation.*",
)
# Changes that the old state cannot be combined with, and why.
IMPOSSIBLE = {
    "training.seq_len": "a position in the data counts samples of that length",
    **dict.fromkeys(("lora.enable", "lora.rank", "lora.modules"), "the optimizer's state is that of other parameters"),
}
_DATA = "data"  # text and tokenizer, in checkpoint.allow_changes


class Progress(NamedTuple):
    """A run's position in data and schedule."""

    step: int = 0
    samples: int = 0


class Change(NamedTuple):
    """A key whose value differs from the checkpoint's."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.now!r}, was {self.before!r}"


def numbers_of(
    config: Config, family: Family, data: Data, schedule: Schedule, progress: Progress, global_batch: int
) -> dict[str, Any]:
    """The state of a run that is not a tensor, for a checkpoint's manifest."""
    return {
        "step": progress.step,
        "samples": progress.samples,
        "global_batch": global_batch,
        "data": data.describe(),
        "schedule": schedule._asdict(),
        "architecture": family.dimensions(),
        "config": config.model_dump(),
    }


def imported_numbers(family: Family, model: dict[str, str]) -> dict[str, Any]:
    """The same for imported weights. model: the keys of [model] that describe them."""
    nothing = {"step": 0, "samples": 0, "global_batch": 0, "data": {}, "schedule": {}}
    return {**nothing, "architecture": family.dimensions(), "config": {"model": model}, "imported": True}


def restore(
    config: Config,
    family: Family,
    data: Data,
    global_batch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale | None,
    folder: Path,
) -> tuple[Progress, Schedule]:
    """Loads the state that the run begins with; returns its position and its schedule. All ranks together.

    In this order: the checkpoint that `load_step` names, the newest sound one of this run in `folder`, the one that
    `initial_load_path` names, the initial weights, which the model has already. Raises UserError for a checkpoint that does
    not fit the run, with all its faults.
    """
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    cfg = config.checkpoint
    begin = _own_checkpoint(cfg, folder) if cfg.enable else None
    if begin is None and not (cfg.enable and cfg.initial_load_path):
        if config.lora.enable:
            # no error: speed, memory and the comparisons of `titanlite verify` do not depend on the weights
            log.warning("lora.enable = true: the weights that are adapted are RANDOM, set checkpoint.initial_load_path")
        return Progress(), build_schedule(config)
    if begin is None:
        source = Path(cfg.initial_load_path)
        if cfg.initial_load_in_hf:
            weights = find_weights(source, family, model, cfg.exclude_from_loading)
            load_weights(model_tensors(model), weights)
            log.info("weights read from %s", source)
            return Progress(), build_schedule(config)
        begin = source, load.verified(source)
        if cfg.initial_load_model_only:
            for change in family.changes_since(begin[1].numbers["architecture"]):
                log.info("the model differs from that of the weights: %s", change)
            load.load_tensors(*begin, _to_begin_with(config, *begin, model), cfg.exclude_from_loading, "model.")
            log.info("weights read from %s", source)
            return Progress(), build_schedule(config)
    start = load_run(*begin, config, family, data, global_batch, run_tensors(model, optimizer, loss_scale))
    log.info("resumed from %s", begin[0])
    return start


def _to_begin_with(config: Config, source: Path, found: Manifest, model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a new run takes from another run's weights: adapters only where that run had them."""
    tensors, adapted = model_tensors(model), found.numbers.get("config", {}).get("lora", {}).get("enable")
    if adapted and not config.lora.enable:
        raise UserError(
            f"{source}: its weights have adapters, which lora.enable = false cannot load; begin from an export, "
            "where they are merged, or set lora.enable = true with the same rank and modules"
        )
    if config.lora.enable and not adapted:
        return {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    return tensors


def load_run(
    source: Path,
    found: Manifest,
    config: Config,
    family: Family,
    data: Data,
    global_batch: int,
    tensors: dict[str, Tensor],
) -> tuple[Progress, Schedule]:
    """Loads one checkpoint into `tensors`. Raises UserError for one that does not fit."""
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    _refuse_foreign(source, found)
    schedule = check_changes(config, family, data, global_batch, source, found)
    load.load_tensors(source, found, tensors, excluded(config, found))
    return Progress(found.numbers["step"], found.numbers["samples"]), schedule


def imported_fault(source: Path, found: Manifest) -> str:
    """Why a run cannot continue from a checkpoint of `titanlite import-hf`; empty for other checkpoints."""
    if not found.numbers.get("imported"):
        return ""
    return (
        f"{source}: holds weights alone, made by import-hf, without optimizer state, step or data position; begin "
        "from it with checkpoint.initial_load_path and checkpoint.initial_load_model_only = true"
    )


def _refuse_foreign(source: Path, found: Manifest) -> None:
    """Raises UserError for a sound checkpoint whose numbers are not those of `numbers_of`."""
    numbers = found.numbers
    if fault := imported_fault(source, found):
        raise UserError(fault)
    tables = numbers["config"].get("checkpoint"), numbers["config"].get("training"), numbers["data"].get("sources")
    if not all(isinstance(table, dict) for table in numbers["config"].values()) or None in tables:
        raise UserError(f"{source}: its manifest is sound, but does not describe a run of titanlite")
    if not isinstance(numbers["schedule"].get("total_steps"), int):
        raise UserError(f"{source}: its manifest is sound, but has no schedule")


def excluded(config: Config, found: Manifest) -> list[str]:
    """Patterns of tensors that are not loaded: none where the run that wrote the checkpoint excluded the same ones."""
    patterns = config.checkpoint.exclude_from_loading
    return [] if found.numbers["config"]["checkpoint"].get("exclude_from_loading") == patterns else patterns


def _own_checkpoint(cfg: Checkpoint, folder: Path) -> tuple[Path, Manifest] | None:
    """The checkpoint of this run to continue from: the newest sound one, or the one that `load_step` names.

    load_step takes effect once: a run continues from what an earlier start with the same load_step has saved. Otherwise a
    scheduler that stops and starts the run would send it back every time.
    """
    from titanlite.checkpoint import load  # not at the top: a check needs no torch.distributed.checkpoint

    newest = load.newest_sound(folder)
    if newest is not None:
        _refuse_foreign(*newest)
    if newest is None or cfg.load_step < 0:
        return newest
    numbers = newest[1].numbers
    if numbers["step"] >= cfg.load_step == numbers["config"]["checkpoint"].get("load_step"):
        log.info("checkpoint.load_step = %d took effect before; to go back again, rename the later checkpoints", cfg.load_step)
        return newest
    source = step_folder(folder, cfg.load_step)
    return source, load.verified(source)


def check_changes(config: Config, family: Family, data: Data, global_batch: int, source: Path, found: Manifest) -> Schedule:
    """The schedule of a resumed run: the stored one, unless the configuration sets another length and it is allowed.

    Raises UserError that lists every impossible or forbidden change.
    """
    numbers = found.numbers
    if reshaped := family.changes_since(numbers["architecture"]):
        raise UserError(
            "\n  ".join([f"{source}: has another architecture than {config.model.name} {config.model.flavor}:", *reshaped])
            + "\nA changed model is another run: give it its own job.dump_folder; checkpoint.initial_load_path and "
            "checkpoint.exclude_from_loading load the weights that still fit"
        )
    different = list(changes(config, data, global_batch, numbers))
    if impossible := [change for change in different if change.key in IMPOSSIBLE]:
        raise UserError(
            "\n".join([f"{source}: cannot be resumed with", *(f"  {c}: {IMPOSSIBLE[c.key]}" for c in impossible)])
            + "\nRestore the old value, or begin another run from the weights alone: checkpoint.initial_load_path"
        )
    allowed = config.checkpoint.allow_changes
    refused = [c for c in different if not any(fnmatch.fnmatchcase(c.key, pattern) for pattern in allowed)]
    if refused:
        raise UserError(
            "\n".join(
                [
                    f"{source}: later steps would be computed differently from the earlier ones:",
                    *(f"  {change}" for change in refused),
                    *(
                        f"The batch follows from the mesh; to keep it: --training.global_batch_size {change.before}"
                        for change in refused
                        if change.key == "training.global_batch_size" and config.training.global_batch_size == -1
                    ),
                    f"Restore the old value, or allow the change: {_allow(config, [change.key for change in refused])}",
                ]
            )
        )
    for change in different:
        log.info("changed since the checkpoint, as allowed: %s", change)
    schedule = build_schedule(config, config.lr_scheduler.total_steps or numbers["schedule"]["total_steps"])
    if config.training.steps > schedule.total_steps and schedule.at(schedule.total_steps + 1) == 0.0:
        raise UserError(
            f"training.steps = {config.training.steps}: the schedule of {source} ends at step {schedule.total_steps}, with a "
            f"learning rate of 0. To stretch it: --lr_scheduler.total_steps {config.training.steps} "
            f"{_allow(config, ['lr_scheduler.total_steps'])}"
        )
    return schedule


def _allow(config: Config, keys: list[str]) -> str:
    """The option that allows these keys and those allowed already."""
    return f"--checkpoint.allow_changes {shlex.quote(','.join([*config.checkpoint.allow_changes, *keys]))}"


def changes(config: Config, data: Data, global_batch: int, numbers: dict[str, Any]) -> Iterator[Change]:
    """Differences between a checkpoint's numbers and a run that change the mathematics of later steps."""
    # A key that did not exist yet had no effect, which its default expresses.
    before, now = _flat(Config().model_dump()) | _flat(numbers["config"]), _flat(config.model_dump())
    # -1 and an unset length stand for the values that were derived.
    before["training.global_batch_size"], now["training.global_batch_size"] = numbers["global_batch"], global_batch
    planned = numbers["schedule"]["total_steps"]
    before["lr_scheduler.total_steps"] = planned
    now["lr_scheduler.total_steps"] = config.lr_scheduler.total_steps or planned
    for key, then, value in _differences(before, now):
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in HARMLESS):
            yield Change(key, then, value)
    yield from _data_changes(numbers["data"], data.describe())


def _data_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """Differences between two descriptions of data (`Data.describe`), names of sources and paths of files apart."""
    if before["tokenizer"] != now["tokenizer"]:
        yield Change(_DATA, f"tokenizer {before['tokenizer']}", f"tokenizer {now['tokenizer']}")
    for then, source in itertools.zip_longest(before["sources"], now["sources"]):
        if then is None or source is None or {**then, "name": ""} != {**source, "name": ""}:
            yield Change(_DATA, _source_sentence(then), _source_sentence(source))


def _source_sentence(source: dict[str, Any] | None) -> str:
    if source is None:
        return "no such source"
    return (
        f"{source['name']}: {source['tokens']:,} tokens in {source['documents']:,} documents, fingerprint "
        f"{source['fingerprint'][:12]}, {source['share']:.4%} of samples"
    )


def changeable(config: Config) -> list[str]:
    """The keys that checkpoint.allow_changes can name."""
    keys = [key for key in _flat(config.model_dump()) if not any(fnmatch.fnmatchcase(key, p) for p in HARMLESS)]
    return [*(key for key in keys if key not in IMPOSSIBLE), _DATA]


def _flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value before, value now) for each change; a new name is no change."""
    for name, value in now.items():
        if name in before and before[name] != value:
            yield name, before[name], value


# ------------------------------------------------------------------------------------------------------------------ the check


def faults(config: Config) -> Iterator[str]:
    """What a run cannot start from or go back to, and changes that cannot be allowed."""
    cfg, source = config.checkpoint, Path(config.checkpoint.initial_load_path)
    if not cfg.enable:
        return
    started = bool(list_steps(Path(config.job.dump_folder) / cfg.folder))  # then initial_load_path is not read any more
    if cfg.initial_load_path and cfg.initial_load_in_hf:
        if not cfg.initial_load_model_only:
            yield (
                "checkpoint.initial_load_model_only = false: a folder in Hugging Face's format holds weights only; set it to "
                "true, or checkpoint.initial_load_in_hf to false"
            )
    elif cfg.initial_load_path and not started:
        yield from _initial_load_faults(source, cfg.initial_load_model_only)
    if config.training.on_nonfinite == "rollback" and cfg.exclude_from_loading:
        yield (
            'training.on_nonfinite = "rollback": goes back to a whole checkpoint, and checkpoint.exclude_from_loading = '
            f"{cfg.exclude_from_loading} to a part of it; start a run with the one, and continue with the other"
        )
    known = changeable(config)
    for pattern in cfg.allow_changes:
        if not fnmatch.filter(known, pattern):
            close = difflib.get_close_matches(pattern, known, 1)
            meant = f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"
            yield f'checkpoint.allow_changes: "{pattern}" is no key that must be allowed to change{meant}'


def _initial_load_faults(source: Path, model_only: bool) -> Iterator[str]:
    if not (source / manifest.FILE).is_file():
        hint = "; it looks like Hugging Face's format: set checkpoint.initial_load_in_hf = true"
        is_hf = (source / "config.json").is_file()
        yield f'checkpoint.initial_load_path = "{source}": not a checkpoint, such as .../step-00000100{hint if is_hf else ""}'
    elif not model_only:
        try:
            yield from filter(None, [imported_fault(source, manifest.read(source))])
        except manifest.Damaged:
            return  # reported when it is loaded, with everything that is damaged
        except UserError as error:
            yield str(error)
