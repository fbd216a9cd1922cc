"""What must hold between several keys, the model, the data and the machine. Every fault is found before any process starts."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from titanlite.checkpoint import list_steps, step_folder
from titanlite.config import Config
from titanlite.config_file import report
from titanlite.data.documents import list_files
from titanlite.data.tokenizer import DEFAULT_VOCABULARY, load_tokenizer
from titanlite.errors import UserError
from titanlite.initialize import named_tensors
from titanlite.mesh import resolve_degrees
from titanlite.optimizer import is_decayed
from titanlite.parallelize import sharding_faults
from titanlite.zoo import Family, load_family, match_table

# Dimensions of a model's Config that every tensor-parallel rank takes an equal share of, where a family has them.
_SPLIT_DIMENSIONS = ("n_heads", "n_kv_heads", "ffn_dim")


def check(config: Config, path: str, world_size: int, local_size: int | None = None) -> None:
    """Raises UserError that lists every fault of a configuration for `world_size` processes, `local_size` of them here."""
    faults = [
        *_mesh_faults(config, world_size, local_size),
        *_model_faults(config),
        *_batch_faults(config, world_size),
        *_schedule_faults(config),
        *_data_faults(config),
        *_folder_faults(config),
    ]
    if faults:
        raise UserError(report(path, faults))


def _degrees(config: Config, world_size: int) -> dict[str, int] | None:
    try:
        return resolve_degrees(config.parallelism, world_size)
    except UserError:
        return None  # reported by _mesh_faults


def _mesh_faults(config: Config, world_size: int, local_size: int | None) -> Iterator[str]:
    gpus = torch.cuda.device_count()
    if local_size is not None and gpus and local_size > gpus:
        yield f"NGPU = {local_size}: this machine has {gpus} visible GPUs"
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except UserError as error:
        yield str(error)
        return
    tensor, shard = degrees["tp"], degrees["dp_shard"]
    if config.training.seq_len % tensor:
        yield (
            f"parallelism.tensor_parallel_degree = {tensor}: does not divide training.seq_len = {config.training.seq_len}, "
            "which is split between layers"
        )
    reshard = config.parallelism.fsdp_reshard_after_forward
    if isinstance(reshard, int) and (shard % reshard or reshard >= shard):
        yield (
            f"parallelism.fsdp_reshard_after_forward = {reshard}: must be smaller than data_parallel_shard_degree = {shard} "
            'and divide it, or be "default", "always" or "never"'
        )


def _model_faults(config: Config) -> Iterator[str]:
    try:
        family = load_family(config.model.name, config.model.flavor)
    except UserError as error:
        yield str(error)
        return
    tensor = config.parallelism.tensor_parallel_degree
    sizes = {name: getattr(family.config, name, tensor) for name in _SPLIT_DIMENSIONS}
    undivided = [f"{name} = {size}" for name, size in sizes.items() if size % tensor]
    if undivided:
        yield (
            f"parallelism.tensor_parallel_degree = {tensor}: does not divide {', '.join(undivided)} "
            f"of {config.model.name} {config.model.flavor}"
        )
    model = family.on_meta()
    # the matrices' widths follow from the dimensions: one fault is enough
    yield from sharding_faults(model, family, 1 if undivided else tensor)
    yield from match_table(family.module.initial(family.config), [name for name, _ in named_tensors(model)], "initial")[1]
    yield from _decay_faults(config, model)
    yield from _vocabulary_faults(config, family)


def _decay_faults(config: Config, model: torch.nn.Module) -> Iterator[str]:
    pattern = config.optimizer.decay_parameters
    if not pattern:
        return
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"optimizer.decay_parameters = {pattern!r}: not a regular expression: {error}"
        return
    if config.optimizer.weight_decay == 0:
        yield f"optimizer.decay_parameters = {pattern!r}: has no effect with optimizer.weight_decay = 0"
    if not any(is_decayed(name, p, config.optimizer) for name, p in model.named_parameters()):
        yield f"optimizer.decay_parameters = {pattern!r}: matches no parameter's name"


def _vocabulary_faults(config: Config, family: Family) -> Iterator[str]:
    try:
        folder = config.model.hf_assets_path
        size = load_tokenizer(folder).vocabulary if folder else DEFAULT_VOCABULARY
    except UserError as error:
        yield str(error)
        return
    if size > family.config.vocab_size:
        source = f'"{folder}"' if folder else "the default tokenizer (model.hf_assets_path is empty)"
        yield (
            f"model.hf_assets_path: {source} has ids up to {size - 1}, and {config.model.name} {config.model.flavor} "
            f"has a vocabulary of {family.config.vocab_size}"
        )


def _batch_faults(config: Config, world_size: int) -> Iterator[str]:
    degrees = _degrees(config, world_size)
    given = config.training.global_batch_size
    if given == 0:
        yield "training.global_batch_size = 0: must be -1 (derived) or at least 1"
    elif degrees and given > 0:
        parts = degrees["dp_replicate"] * degrees["dp_shard"]
        local = config.training.local_batch_size
        if given % (parts * local):
            yield (
                f"training.global_batch_size = {given}: must be a multiple of training.local_batch_size = {local} "
                f"x {parts} data-parallel ranks = {parts * local}"
            )


def _schedule_faults(config: Config) -> Iterator[str]:
    keys, total = config.lr_scheduler, config.schedule_steps
    length = f"lr_scheduler.total_steps = {total}" if keys.total_steps else f"training.steps = {total}"
    decay = 0 if keys.decay_ratio is None else round(total * keys.decay_ratio)
    if keys.warmup_steps > total:
        yield f"lr_scheduler.warmup_steps = {keys.warmup_steps}: the schedule ends before, at {length}"
    elif keys.warmup_steps + decay > total:
        yield (
            f"lr_scheduler.decay_ratio = {keys.decay_ratio}: a decay of {decay} steps and "
            f"lr_scheduler.warmup_steps = {keys.warmup_steps} do not fit in {length}"
        )
    if config.training.steps > total and keys.min_lr_factor == 0 and keys.decay_ratio != 0:
        yield (
            f"training.steps = {config.training.steps}: after {length} the learning rate is 0; raise "
            "lr_scheduler.total_steps or set lr_scheduler.min_lr_factor"
        )


def _data_faults(config: Config) -> Iterator[str]:
    try:
        list_files(config.training.dataset, config.training.dataset_path)
    except UserError as error:
        yield str(error)


def _folder_faults(config: Config) -> Iterator[str]:
    dump = Path(config.job.dump_folder)
    existing = next(folder for folder in (dump, *dump.absolute().parents) if folder.exists())
    if not existing.is_dir():
        yield f'job.dump_folder = "{dump}": {existing} is a file'
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f'job.dump_folder = "{dump}": no permission to write in {existing}'
    for key, name in (
        ("checkpoint.folder", config.checkpoint.folder),
        ("metrics.save_tb_folder", config.metrics.save_tb_folder),
    ):
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            yield f'{key} = "{name}": must be a folder inside job.dump_folder'
    keys = config.checkpoint
    if not keys.enable:
        for name in ("load_step", "initial_load_path"):
            if getattr(keys, name) != type(keys).model_fields[name].default:
                yield f"checkpoint.{name} = {getattr(keys, name)!r}: has no effect with checkpoint.enable = false"
        return
    if keys.initial_load_path and not (Path(keys.initial_load_path) / ".metadata").is_file():
        yield f'checkpoint.initial_load_path = "{keys.initial_load_path}": not a checkpoint, such as .../step-00000100'
    folder = dump / keys.folder
    if keys.load_step >= 0 and not step_folder(folder, keys.load_step).is_dir():
        have = ", ".join(str(step) for step in list_steps(folder)) or "none"
        yield f"checkpoint.load_step = {keys.load_step}: not in {folder}, which has: {have}"
