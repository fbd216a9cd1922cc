"""Keys that titanlite does not have, of torchtitan's TOML files (0.2 and before) and of its own past.

`take_foreign_keys` accepts a value that requests what titanlite does anyway (SAME), an option of a feature that is off
(SWITCHES), and another name or value of a key of titanlite (RENAMED, REWRITTEN). `read.py` refuses every other one with the
remedy in INSTEAD. A star stands for the rest of a name; INSTEAD lists a whole section by its name. A key that has only moved to
another section is not here: the same name is suggested.
"""

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from titanlite.config.effects import OPTION, UNSET, Layer

_STAGES = "use pipeline_parallel_layers_per_stage; without it, stages take the same FLOPs, those of the head included"
_NO_IMAGES = "models read text only"

INSTEAD: dict[str, str] = {
    # sections
    "fault_tolerance": "remove it; a restarted job resumes from its newest checkpoint",
    "experimental": "set model.name to the dotted name of your own module; for pipelines, parallelism.pipeline_parallel_degree",
    "mx": "there are no MX formats; use training.mixed_precision_param",
    "quantize": "[float8] has recipe_name, enable_fsdp_float8_all_gather, emulate, and filter_fqns with patterns of titanlite's"
    " names, such as layers.*.attention.w[kv]; there are no MX formats and no grouped products",
    "hf_transformers": "set model.name to a family of models/; titanlite import-hf names the one that reads a config.json",
    "encoder": _NO_IMAGES,
    "inference": _NO_IMAGES,
    "data": _NO_IMAGES,
    "memory_estimation": "use the command `titanlite estimate CONFIG --ranks N`",
    "debug": "use training.seed and training.deterministic",
    # options of other commands
    "ranks": "the environment says how many ranks there are: NGPU x NNODES",
    # keys
    "float8.force_recompute_fp8_weight_in_bwd": "use activation_checkpoint.mode; remove the key",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "a model's KEEP table says what else is kept",
    "activation_checkpoint.visualize_memory_budget_pareto": "not supported; remove the key",
    "activation_checkpoint.debug": "not supported; remove the key",
    "compile.unit": "each block is one graph; remove the key",
    "validation.local_batch_size": "validation uses training.local_batch_size",
    "validation.seq_len": "validation uses training.seq_len",
    "profiling.profiler_*": "one step is traced every profiling.profile_freq steps",
    "job.config_file": "the configuration file is the first argument of run_train.sh",
    "job.custom_config_module": "set model.name to the dotted name of your own module",
    "job.use_for_integration_test": "remove it",
    "job.enable_wandb": "metrics.jsonl and TensorBoard contain all metrics",
    "model.tokenizer_path": "use model.hf_assets_path, the folder with tokenizer.json",
    "model.tokenizer_type": "use model.hf_assets_path; tokenizer.json says which kind it is",
    "model.norm_type": "a model's norm is in its file; copy models/llama3.py to change it",
    "model.converters": "use float8.enable; for anything else change the model's own file",
    "model.print_after_conversion": "there are no model converters; remove the key",
    "training.batch_size": "use training.local_batch_size (per rank) or training.global_batch_size (per step)",
    "training.gradient_accumulation_steps": "use training.global_batch_size",
    "training.gc_debug": "remove it",
    "training.dataloader": "use dataloader.workers and dataloader.prefetch",
    "training.img_size": _NO_IMAGES,
    "training.classifier_free_guidance_prob": _NO_IMAGES,
    "validation.*classifier_free_guidance*": _NO_IMAGES,
    "validation.all_timesteps": _NO_IMAGES,
    "validation.denoising_steps": _NO_IMAGES,
    "validation.save_img_*": _NO_IMAGES,
    "training.data_parallel_degree": "use parallelism.data_parallel_shard_degree",
    "parallelism.disable_loss_parallel": "the loss is always vocabulary-parallel under tensor parallelism",
    "parallelism.enable_compiled_autograd": "compiled autograd is not supported; remove the key",
    "parallelism.module_fqns_per_model_part": _STAGES,
    "parallelism.pipeline_parallel_split_points": _STAGES,
    "parallelism.pipeline_parallel_first_stage_less_layers": _STAGES,
    "parallelism.pipeline_parallel_last_stage_less_layers": _STAGES,
    "parallelism.pipeline_parallel_microbatch_size": "use training.local_batch_size, the sequences of a microbatch, and "
    "training.global_batch_size, those of a step",
    "parallelism.pipeline_parallel_schedule_csv": "use parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "not supported; remove the key",
    "parallelism.context_parallel_rotate_method": 'use parallelism.context_parallel_method; "gather" is what "allgather" does',
    "parallelism.context_parallel_load_balancer": "all ranks have as many keys to attend to; remove the key",
    "parallelism.expert_tensor_parallel_degree": "tensor parallelism does not split experts; use expert_parallel_degree alone",
    "parallelism.expert_parallel_comm_backend": "rows are exchanged by PyTorch's all-to-all; remove the key",
    "optimizer.early_step_in_backward": "gradients are clipped by their global norm, so no step is possible before",
    "optimizer.fused": 'use optimizer.implementation = "fused"',
    "lr_scheduler.lr_min": "use lr_scheduler.min_lr_factor",
    "checkpoint.interval_type": "checkpoint.interval counts steps",
    "checkpoint.model_weights_only": "a checkpoint is always complete; initial_load_path reads the weights alone",
    "checkpoint.last_save_model_only": "a checkpoint is always complete; remove the key",
    "checkpoint.export_dtype": "weights are saved in training.dtype; `titanlite export-hf --dtype bfloat16` exports less",
    "checkpoint.create_seed_checkpoint": "initial weights are the same on every mesh already; remove the key",
    "checkpoint.enable_first_step_checkpoint": "set checkpoint.interval; the last step is always saved",
    "checkpoint.load_only": "set a checkpoint.interval larger than training.steps",
    "metrics.save_for_all_ranks": "metrics are global, written by rank 0",
    "metrics.enable_wandb": "metrics.jsonl and TensorBoard contain all metrics",
    "comm.mode": "use the command `titanlite estimate CONFIG --ranks N`",
}

# Values that request what titanlite does anyway, and colours, which change nothing. Of every other key here, false does too: it
# switches off what titanlite does not have.
SAME: dict[str, tuple[Any, ...]] = {
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (["moe.router.gate"], []),  # experts only
    "activation_checkpoint.early_stop": (True, False),  # changes time only
    "activation_checkpoint.preserve_rng_state": (True,),
    "activation_checkpoint.determinism_check": ("default",),
    "checkpoint.initial_load_in_hf_quantized": (True, False),  # config.json says whether weights are quantised
    "parallelism.context_parallel_rotate_method": ("allgather",),  # the default, "gather"
    "parallelism.expert_tensor_parallel_degree": (1,),
    "parallelism.expert_parallel_comm_backend": ("standard",),
    "quantize.linear.float8.filter_fqns": ([], ["output"]),  # the head is never in float8
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (False, True),  # done for every float8 all-gather
    "float8.precompute_float8_dynamic_scale_for_fsdp": (False, True),
    "quantize.grouped_mm.*.fqns": ([],),
    "training.enable_loss_parallel": (True,),
    "training.dataloader.pin_memory": (False, True),  # changes time only
    "training.dataloader.persistent_workers": (False, True),
    "optimizer.fused": (True,),
    "checkpoint.export_dtype": ("float32",),
    "checkpoint.enable_ft_dataloader_checkpoints": (True,),
    "metrics.disable_color_printing": (False, True),
    "metrics.rank_0_only": (True,),
    "comm.mode": ("default",),
    "comm.save_traces_folder": ("comm_traces",),
    "comm.save_traces_file_prefix": ("rank_",),
    "job.custom_config_module": ("",),
    "experimental.custom_*": ("",),
}
# Options of a feature, the key that switches it, and the value (torchtitan's default) with which they have no effect.
SWITCHES: dict[str, tuple[str, Any]] = {
    "checkpoint.last_save_model_only": ("checkpoint.enable", False),
    "checkpoint.export_dtype": ("checkpoint.enable", False),
    "parallelism.module_fqns_per_model_part": ("parallelism.pipeline_parallel_degree", 1),
    "parallelism.pipeline_parallel_split_points": ("parallelism.pipeline_parallel_degree", 1),
    "parallelism.pipeline_parallel_*_stage_less_layers": ("parallelism.pipeline_parallel_degree", 1),
    "parallelism.pipeline_parallel_microbatch_size": ("parallelism.pipeline_parallel_degree", 1),
    "parallelism.pipeline_parallel_schedule_csv": ("parallelism.pipeline_parallel_degree", 1),
    "parallelism.pipeline_parallel_expert_parallel_overlap": ("parallelism.pipeline_parallel_degree", 1),
    "parallelism.context_parallel_rotate_method": ("parallelism.context_parallel_degree", 1),
    "parallelism.context_parallel_load_balancer": ("parallelism.context_parallel_degree", 1),
    "parallelism.expert_tensor_parallel_degree": ("parallelism.expert_parallel_degree", 1),
    "parallelism.expert_parallel_comm_backend": ("parallelism.expert_parallel_degree", 1),
    "profiling.profiler_*": ("profiling.enable_profiling", False),
    "fault_tolerance.*": ("fault_tolerance.enable", False),
    "memory_estimation.*": ("memory_estimation.enable", False),
}
RENAMED: dict[str, str] = {
    "quantize.linear.float8.recipe_name": "float8.recipe_name",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.emulate": "float8.emulate",
    "training.dataloader.num_workers": "dataloader.workers",
    "training.dataloader.prefetch_factor": "dataloader.prefetch",
    "training.enable_cpu_offload": "parallelism.cpu_offload",
    "training.compile": "compile.enable",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
}
# key, its value or only entry -> the key and value of titanlite
REWRITTEN: list[tuple[str, Any, str, Any]] = [
    ("model.converters", "float8", "float8.enable", True),
    ("model.converters", "quantize.linear.float8", "float8.enable", True),
    ("model.converters", [], "float8.enable", False),  # over what a base has
]
_ANYWAY = "what titanlite does anyway"
_DIGITS = ("activation_checkpoint.selective_ac_option",)  # keys of titanlite that torchtitan writes as text


def is_foreign(key: str) -> bool:
    """Whether the tables name this key, or its section."""
    return key in RENAMED or any(fnmatchcase(key, pattern) or key.startswith(f"{pattern}.") for pattern in INSTEAD)


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


INSTEAD |= {
    key: f"titanlite always does what {' or '.join(map(_text, same))} requests; remove the key"
    for key, same in SAME.items()
    if not is_foreign(key)
}


def take_foreign_keys(values: dict[str, Any], origins: dict[str, Layer]) -> tuple[list[str], list[str]]:
    """Replaces the keys and values in `values` that the tables above accept; -> (what was taken how, faults).

    values: the merged tables of files and options. origins: the dotted name of each key -> what has set it; the new keys are
    added. Of two names of one key the one of the later layer counts; in one layer they are a fault. Where a file has such keys,
    all its layers are marked as foreign.
    """
    paths = dict(leaves(values))
    if any(is_foreign(".".join(path)) and _origin(path, origins) != OPTION for path in paths):
        origins.update({key: layer._replace(foreign=layer != OPTION) for key, layer in origins.items()})
    settings = {".".join(path): value for path, value in paths.items()}
    taken: list[str] = []
    faults: list[str] = []
    for path, value in sorted(paths.items(), key=lambda entry: ".".join(entry[0]) not in RENAMED):  # these can be switches
        key = ".".join(path)
        if (new := _taken_as(key, value, settings)) is None:
            continue
        ours, meant, reason = new
        _remove(values, path)
        mine, other = _origin(path, origins), _origin(ours.split("."), origins)
        if ours != key and ours in settings and mine.number <= other.number:
            if mine.number == other.number:
                faults.append(f"{key} and {ours} are one option; give only {ours}")
            reason = f"overridden by --{ours}" if other == OPTION else f"overridden by {ours} of {other.name}"
            ours = ""
        elif ours:
            section, _, name = ours.partition(".")
            values.setdefault(section, {})[name] = settings[ours] = meant
            if ours != key:
                origins[ours] = mine._replace(name=f"given as {key}")
        taken.append(f"{key} = {_text(value)} -> " + (f"{ours} = {_text(meant)}" if ours else reason))
    return taken, faults


def _taken_as(key: str, value: Any, settings: dict[str, Any]) -> tuple[str, Any, str] | None:
    """(our key or "", its value, the reason to leave it out) of a setting; None: the tables do not accept it."""
    if key in _DIGITS:
        return (key, int(value), "") if isinstance(value, str) and value.isdecimal() else None
    if key in RENAMED:
        return RENAMED[key], value, ""
    for theirs, their_value, ours, meant in REWRITTEN:
        if theirs == key and value in (their_value, [their_value]):
            return ours, meant, ""
    accepted = next((same for pattern, same in SAME.items() if fnmatchcase(key, pattern)), (False,) if is_foreign(key) else ())
    if any(same == value and type(same) is type(value) for same in accepted):  # 1 == True, but stands for no boolean
        return "", None, _ANYWAY
    for pattern, (switch, off) in SWITCHES.items():
        if fnmatchcase(key, pattern) and settings.get(switch, off) == off:
            return "", None, _ANYWAY if key == switch else f"no effect with {switch} = {_text(off)}"
    return None


def _origin(path: Sequence[str], origins: dict[str, Layer]) -> Layer:
    """What has set a key; what nothing has set is before all files."""
    return origins.get(".".join(path), UNSET)


def leaves(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names of the tables and the key, value) of every value that is no table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _remove(table: dict[str, Any], path: tuple[str, ...]) -> None:
    """Removes a key, and the tables that it leaves empty."""
    if len(path) > 1:
        _remove(table[path[0]], path[1:])
    if len(path) == 1 or not table[path[0]]:
        del table[path[0]]
