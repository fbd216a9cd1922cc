"""What must hold between several keys, the model, the data and the machine. Every fault is found before any process starts."""

import difflib
import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from models.head import Head
from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, room_fault, step_folder
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.read import report
from titanlite.config.schema import Checkpoint, Config, Dataloader, Lora
from titanlite.data.sources import key_of, source_fault, sources_of
from titanlite.data.tokenizer import DEFAULT_VOCABULARY, load_tokenizer
from titanlite.errors import UserError
from titanlite.hf.folder import find_weights, their_names
from titanlite.loop.kernel_checks import kernel_faults
from titanlite.loop.optimizer_checks import has_compiler, optimizer_faults
from titanlite.loop.resume import changeable, imported_fault
from titanlite.optim.build import is_decayed
from titanlite.optim.state import checkpoint_bytes
from titanlite.parallel.fsdp import needs_fsdp
from titanlite.parallel.mesh import resolve_degrees
from titanlite.parallel.tensor import sharding_faults
from titanlite.transforms.initialize import match_initial
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import Family, described, family_of, is_adapter, place_of, read_description

# Dimensions of a model's Config that every tensor-parallel rank takes an equal share of, where a family has them.
_SPLIT_DIMENSIONS = ("n_heads", "n_kv_heads", "ffn_dim")


def check(config: Config, path: str, world_size: int, local_size: int | None = None, open_files: bool = True) -> None:
    """Raises UserError that lists every fault of a configuration for `world_size` processes, `local_size` of them here.

    open_files: False for a rank, which opens and validates the token files next.
    """
    faults = [
        *_mesh_faults(config, world_size, local_size),
        *_model_faults(config, local_size),
        *_batch_faults(config, world_size),
        *_schedule_faults(config),
        *_data_faults(config, open_files),
        *_folder_faults(config),
        *_checkpoint_faults(config),
        *_device_faults(config),
        *_recompute_faults(config),
        *_compile_faults(config, world_size),
        *_lora_faults(config),
        *optimizer_faults(config),
        *kernel_faults(config),
    ]
    if faults:
        raise UserError(report(path, faults))


def undivided_sizes(family: Family, tensor: int) -> list[str]:
    """The dimensions of a family, such as "n_heads = 3", of which `tensor` ranks cannot take equal shares."""
    sizes = {name: getattr(family.config, name, tensor) for name in _SPLIT_DIMENSIONS}
    return [f"{name} = {size}" for name, size in sizes.items() if size % tensor]


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


def _model_faults(config: Config, local_size: int | None) -> Iterator[str]:
    try:
        family = family_of(config.model)
    except UserError as error:
        yield str(error)
        return
    tensor = config.parallelism.tensor_parallel_degree
    if undivided := undivided_sizes(family, tensor):
        yield (
            f"parallelism.tensor_parallel_degree = {tensor}: does not divide {', '.join(undivided)} "
            f"of {config.model.name} {config.model.flavor}"
        )
    try:
        model = on_meta(family, config)
        # the matrices' widths follow from the dimensions: one fault is enough
        yield from sharding_faults(model, family, 1 if undivided else tensor)
        yield from match_initial(model, family)[1]
        family.module.flops(family.config, config.training.seq_len)
    except UserError as error:  # of lora.modules
        yield from str(error).splitlines()
        return
    except Exception as error:  # whatever the user's module raises
        yield f"model.name = {config.model.name!r}: its code failed ({place_of(error)}): {error!r}"
        return
    if config.checkpoint.enable and local_size is not None:  # otherwise this is not the machine that will train
        folder = Path(config.job.dump_folder) / config.checkpoint.folder
        yield from filter(None, [room_fault(folder, checkpoint_bytes(model, config.optimizer), config.checkpoint)])
    yield from _hf_faults(config, family, model)
    head_dim = getattr(family.config, "head_dim", 16)
    if config.training.document_mask and torch.cuda.is_available() and head_dim < 16:
        yield f"training.document_mask = true: FlexAttention has no kernel for head_dim = {head_dim}; it takes 16 or more"
    if config.training.z_loss and not isinstance(model.head, Head):
        yield (
            f"training.z_loss = {config.training.z_loss:g}: the head of {config.model.name} is not models.head.Head, which "
            "knows of it; set it to 0"
        )
    yield from _decay_faults(config, model)
    yield from _vocabulary_faults(config, family)


def _hf_faults(config: Config, family: Family, model: torch.nn.Module) -> Iterator[str]:
    """What is in the way of reading or writing Hugging Face's format; for pairs of keys see `_checkpoint_faults`."""
    keys, source = config.checkpoint, Path(config.checkpoint.initial_load_path)
    begun = bool(list_steps(Path(config.job.dump_folder) / keys.folder))
    if not keys.enable:
        return
    try:
        if keys.last_save_in_hf:
            their_names(family, [n.removeprefix("model.") for n in model_tensors(model) if not is_adapter(n)])
    except UserError as error:
        yield f"checkpoint.last_save_in_hf = true: {error}"
    if not keys.initial_load_in_hf or not keys.initial_load_path or begun:
        return
    try:
        theirs = Family(family.module, described(family.module, read_description(source))).dimensions()
        ours = family.dimensions()
        different = [f"{name} = {now!r}, there {theirs[name]!r}" for name, now in ours.items() if now != theirs[name]]
        if different:
            raise UserError(
                f"config.json is of other dimensions than {config.model.name} {config.model.flavor}: {'; '.join(different)}; "
                'model.flavor = "hf" takes those of model.hf_assets_path'
            )
        find_weights(source, family, model, keys.exclude_from_loading)
    except UserError as error:
        yield f'checkpoint.initial_load_path = "{source}": {error}'


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
    if not any(p.requires_grad and is_decayed(name, p, config.optimizer) for name, p in model.named_parameters()):
        yield f"optimizer.decay_parameters = {pattern!r}: matches no trained parameter's name"


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
    if degrees and given:
        yield from _accumulation_faults(config, degrees["dp_replicate"] * degrees["dp_shard"])


def _accumulation_faults(config: Config, parts: int) -> Iterator[str]:
    if (
        not config.parallelism.reduce_every_microbatch
        and config.global_batch(parts) == config.training.local_batch_size * parts
    ):
        yield (
            "parallelism.reduce_every_microbatch = false: has no effect without accumulation; raise training.global_batch_size "
            "or set it to true"
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


def _data_faults(config: Config, open_files: bool) -> Iterator[str]:
    for section in ("training", *(["validation"] if config.validation.enable else [])):
        try:
            for source in sources_of(config, section) if open_files else ():
                yield from filter(None, [source_fault(config, source, key_of(config, section))])
        except UserError as error:
            yield str(error)
    if config.validation.steps == 0:
        yield "validation.steps = 0: must be -1 (all of the data) or at least 1"
    yield from _sample_faults(config)
    if config.training.document_mask and config.training.document_policy == "truncate":
        yield (
            'training.document_mask = true: has no effect with training.document_policy = "truncate", where every sequence is '
            "one document; set it to false"
        )
    if config.dataloader.prefetch != Dataloader().prefetch and not config.dataloader.workers:
        yield f"dataloader.prefetch = {config.dataloader.prefetch}: has no effect with dataloader.workers = 0"


def _sample_faults(config: Config) -> Iterator[str]:
    keys = config.validation
    if keys.sample_prompts and not keys.enable:
        yield "validation.sample_prompts: has no effect with validation.enable = false, since samples follow each round"
    if keys.sample_prompts and not config.metrics.enable_tensorboard:
        yield "validation.sample_prompts: has no effect with metrics.enable_tensorboard = false, where samples are to be read"
    if keys.sample_tokens != type(keys)().sample_tokens and not keys.sample_prompts:
        yield f"validation.sample_tokens = {keys.sample_tokens}: has no effect without validation.sample_prompts"


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
        ("profiling.save_traces_folder", config.profiling.save_traces_folder),
        ("profiling.save_memory_snapshot_folder", config.profiling.save_memory_snapshot_folder),
    ):
        if Path(name) == Path() or Path(name).is_absolute() or ".." in Path(name).parts:
            yield f'{key} = "{name}": must be a folder inside job.dump_folder'
    if Path(config.checkpoint.folder) == Path(config.metrics.save_tb_folder):
        yield f'checkpoint.folder = "{config.checkpoint.folder}": is metrics.save_tb_folder too; give each a folder of its own'


def _checkpoint_faults(config: Config) -> Iterator[str]:
    keys = config.checkpoint
    if not keys.enable:
        for name in ("load_step", "initial_load_path", "exclude_from_loading", "allow_changes"):
            if getattr(keys, name) != type(keys).model_fields[name].default:
                yield f"checkpoint.{name} = {getattr(keys, name)!r}: has no effect with checkpoint.enable = false"
        for name in ("initial_load_in_hf", "last_save_in_hf"):
            if getattr(keys, name):
                yield f"checkpoint.{name} = true: has no effect with checkpoint.enable = false"
        if config.job.time_limit_minutes:
            yield (
                f"job.time_limit_minutes = {config.job.time_limit_minutes:g}: a run that is stopped must have saved what "
                "it has done; set checkpoint.enable = true"
            )
        if config.training.on_nonfinite == "rollback":
            yield 'training.on_nonfinite = "rollback": needs checkpoints to go back to; set checkpoint.enable = true'
        return
    folder = Path(config.job.dump_folder) / keys.folder
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        yield f'checkpoint.folder = "{keys.folder}": no permission to write in {folder}'
    begun = bool(list_steps(folder))  # then it is not read any more, and may be gone
    yield from _initial_load_faults(keys, begun)
    if keys.load_step >= 0 and not step_folder(folder, keys.load_step).is_dir():
        have = ", ".join(str(step) for step in list_steps(folder)) or "none"
        yield f"checkpoint.load_step = {keys.load_step}: not in {folder}, which has: {have}"
    if keys.keep_every_n_steps and not keys.keep_latest_k:
        yield f"checkpoint.keep_every_n_steps = {keys.keep_every_n_steps}: has no effect with keep_latest_k = 0"
    elif keys.keep_every_n_steps % keys.interval:
        yield (
            f"checkpoint.keep_every_n_steps = {keys.keep_every_n_steps}: must be a multiple of "
            f"checkpoint.interval = {keys.interval}, since only those steps are saved"
        )
    if config.training.on_nonfinite == "rollback" and keys.exclude_from_loading:
        yield (
            f'training.on_nonfinite = "rollback": goes back to all of a checkpoint, and checkpoint.exclude_from_loading = '
            f"{keys.exclude_from_loading} to a part of it; begin a run with the one, and go on with the other"
        )
    known = changeable(config)
    for pattern in keys.allow_changes:
        if not fnmatch.filter(known, pattern):
            close = difflib.get_close_matches(pattern, known, 1)
            meant = f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"
            yield f'checkpoint.allow_changes: "{pattern}" is no key that must be allowed to change{meant}'


def _initial_load_faults(keys: Checkpoint, begun: bool) -> Iterator[str]:
    source = Path(keys.initial_load_path)
    if not keys.initial_load_path:
        if not keys.initial_load_model_only:
            yield "checkpoint.initial_load_model_only = false: has no effect without checkpoint.initial_load_path"
        if keys.initial_load_in_hf:
            yield "checkpoint.initial_load_in_hf = true: has no effect without checkpoint.initial_load_path"
    elif keys.initial_load_in_hf:
        if not keys.initial_load_model_only:
            yield (
                "checkpoint.initial_load_model_only = false: a folder in Hugging Face's format holds weights alone; set it to "
                "true, or checkpoint.initial_load_in_hf to false"
            )
    elif not begun and not (source / manifest.FILE).is_file():
        hint = "; it looks like Hugging Face's format: set checkpoint.initial_load_in_hf = true"
        looks = (source / "config.json").is_file()
        yield f'checkpoint.initial_load_path = "{source}": not a checkpoint, such as .../step-00000100{hint if looks else ""}'
    elif not begun and not keys.initial_load_model_only:
        try:
            yield from filter(None, [imported_fault(source, manifest.read(source))])
        except manifest.Damaged:
            return  # told when it is loaded, with all that is damaged
        except UserError as error:
            yield str(error)


def _device_faults(config: Config) -> Iterator[str]:
    if torch.cuda.is_available():
        return
    if config.parallelism.cpu_offload:
        yield "parallelism.cpu_offload = true: has no effect without CUDA: all is in the CPU's memory already; set it to false"
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield 'checkpoint.async_mode = "async_with_pinned_mem": only copies from a GPU gain by pinned memory; use "async"'
    if config.profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot = true: has no effect without CUDA, whose allocator it records; set it to false"
    if config.comm.trace_buf_size:
        yield (
            f"comm.trace_buf_size = {config.comm.trace_buf_size}: has no effect without CUDA, since only NCCL writes its "
            "record; set it to 0"
        )


def _recompute_faults(config: Config) -> Iterator[str]:
    keys, compiled = config.activation_checkpoint, config.compile
    if keys.mode == "memory_budget" and not (
        compiled.enable and "model" in compiled.components and compiled.backend != "eager"
    ):
        yield (
            'activation_checkpoint.mode = "memory_budget": the compiler chooses what to keep; it needs compile.enable = true '
            'with "model" among compile.components, and a compile.backend other than "eager"'
        )
    if compiled.enable and compiled.backend not in torch._dynamo.list_backends(exclude_tags=()):
        backends = ", ".join(torch._dynamo.list_backends())
        yield f'compile.backend = "{compiled.backend}": no such backend; there are: {backends}'
    elif compiled.enable and compiled.backend == "inductor" and not torch.cuda.is_available() and not has_compiler():
        yield (
            'compile.backend = "inductor": needs a C++ compiler on a CPU, and none is found; install g++ or clang, or set '
            "compile.enable = false"
        )
    waits = config.optimizer.implementation != "fused" and config.training.dtype == "float32"
    if config.training.on_nonfinite == "skip" and waits:
        yield (
            f'optimizer.implementation = "{config.optimizer.implementation}": training.on_nonfinite = "skip" needs "fused", '
            "which leaves out a step without waiting for the device"
        )
    if config.training.mixed_precision_param == "float16" and config.optimizer.implementation != "fused":
        yield (
            f'optimizer.implementation = "{config.optimizer.implementation}": training.mixed_precision_param = "float16" needs '
            '"fused", which skips steps that overflow without waiting for the device'
        )
    if config.training.mixed_precision_param == "float16" and config.parallelism.cpu_offload:
        yield (
            'parallelism.cpu_offload = true: with training.mixed_precision_param = "float16" gradients and loss scale would be '
            "on two devices; use bfloat16, or no offload"
        )


def _lora_faults(config: Config) -> Iterator[str]:
    if not config.lora.enable:
        for name, value in config.lora:
            if value != getattr(Lora(), name):
                yield f"lora.{name} = {value!r}: has no effect with lora.enable = false"


def _compile_faults(config: Config, world_size: int) -> Iterator[str]:
    keys = config.compile
    if keys.unit == "model" and not (keys.enable and "model" in keys.components):
        yield 'compile.unit = "model": has no effect without compile.enable = true and "model" among compile.components'
    elif keys.unit == "model" and (reason := needs_fsdp(config, world_size)):
        yield f'compile.unit = "model": one graph of all blocks has no place for FSDP2 between them, and {reason}; set "block"'
