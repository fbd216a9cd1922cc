"""titanlite convert-config FILE.toml [--output FILE.toml]

Writes a configuration of torchtitan (0.2 and before) with titanlite's keys, to standard output or to a new file. Each line that
titanlite cannot take becomes a comment, with the reason and what replaces it. `titanlite check` then names what else is missing
for a run, such as data, a tokenizer or the model family.
"""

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pkgutil import iter_modules
from typing import Any

from pydantic import ValidationError

import models
from titanlite.config.effects import Hardware
from titanlite.config.read import KEYS, SECTIONS, toml_key, toml_value
from titanlite.config.schema import Config
from titanlite.ground.errors import allowed
from titanlite.ground.files import publish, start_output, writing
from titanlite.ground.untrusted import read_toml
from titanlite.tools.options import command_parser, existing_path, new_path

_ALWAYS = "titanlite always does this"
_TIME_ONLY = "changes time only; titanlite has no such key"
_STAGES = "use pipeline_parallel_layers_per_stage; without it, stages get equal FLOPs, including those of the head"
_NO_IMAGES = "models read text only"
_NO_MX = "there are no MX formats and no grouped matmuls in low precision"
_OWN_MODULE = "set model.name to the dotted name of your own module"
_RECORDED = "metrics.jsonl and TensorBoard contain all metrics"

# What replaces a key or section that titanlite does not have; the first pattern that matches counts.
INSTEAD = {
    "fault_tolerance.*": "a restarted job resumes from its newest checkpoint",
    "experimental.*": f"{_OWN_MODULE}; for pipelines, use parallelism.pipeline_parallel_degree",
    "mx.*": f"{_NO_MX}; use training.mixed_precision_param",
    "quantize.linear.float8.filter_fqns": "float8.filter_fqns takes patterns of titanlite's names, such as"
    " layers.*.attention.w[kv]; the head and the router are never in float8",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": "done for every float8 all-gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "done for every float8 all-gather",
    "float8.force_recompute_fp8_weight_in_bwd": "use activation_checkpoint.mode",
    "quantize.*": _NO_MX,
    "hf_transformers.*": "set model.name to a family of models/; titanlite import-hf names the one that reads a config.json",
    "encoder.*": _NO_IMAGES,
    "inference.*": _NO_IMAGES,
    "data.*": _NO_IMAGES,
    "memory_estimation.*": "use the command `titanlite estimate CONFIG --ranks N`",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "a model's KEEP table says what else is kept",
    "activation_checkpoint.visualize_memory_budget_pareto": "not supported",
    "activation_checkpoint.debug": "not supported",
    "activation_checkpoint.early_stop": _TIME_ONLY,
    "activation_checkpoint.*": _ALWAYS,
    "compile.unit": "each block is one graph",
    "validation.local_batch_size": "validation uses training.local_batch_size",
    "validation.seq_len": "validation uses training.seq_len",
    "validation.*": _NO_IMAGES,
    "profiling.profiler_*": "one step is traced every profiling.profile_freq steps",
    "job.config_file": "the configuration file is the first argument of run_train.sh",
    "job.custom_config_module": _OWN_MODULE,
    "job.use_for_integration_test": "nothing depends on it",
    "job.enable_wandb": _RECORDED,
    "model.tokenizer_path": "use model.hf_assets_path, the folder with tokenizer.json",
    "model.tokenizer_type": "use model.hf_assets_path; tokenizer.json says which kind it is",
    "model.norm_type": "a model's norm is in its file; copy models/llama3.py to change it",
    "model.converters": "use float8.enable; for anything else change the model's own file",
    "model.print_after_conversion": "there are no model converters",
    "training.batch_size": "use training.local_batch_size (per rank) or training.global_batch_size (per step)",
    "training.gradient_accumulation_steps": "use training.global_batch_size",
    "training.gc_debug": "not supported",
    "training.dataloader.*": _TIME_ONLY,
    "training.enable_loss_parallel": "the loss is always vocabulary-parallel under tensor parallelism",
    "training.img_size": _NO_IMAGES,
    "training.classifier_free_guidance_prob": _NO_IMAGES,
    "training.data_parallel_degree": "use parallelism.data_parallel_shard_degree",
    "parallelism.disable_loss_parallel": "the loss is always vocabulary-parallel under tensor parallelism",
    "parallelism.enable_compiled_autograd": "compiled autograd is not supported",
    "parallelism.module_fqns_per_model_part": _STAGES,
    "parallelism.pipeline_parallel_split_points": _STAGES,
    "parallelism.pipeline_parallel_*_stage_less_layers": _STAGES,
    "parallelism.pipeline_parallel_microbatch_size": "use training.local_batch_size, the sequences of a microbatch, and"
    " training.global_batch_size, those of a step",
    "parallelism.pipeline_parallel_schedule_csv": "use parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "not supported",
    "parallelism.context_parallel_rotate_method": 'use context_parallel_method; "gather" is torchtitan\'s "allgather"',
    "parallelism.context_parallel_load_balancer": "each rank attends to the same number of keys",
    "parallelism.expert_tensor_parallel_degree": "tensor parallelism does not split experts; use expert_parallel_degree alone",
    "parallelism.expert_parallel_comm_backend": "tokens are exchanged by PyTorch's all-to-all",
    "optimizer.early_step_in_backward": "clipping needs the global gradient norm, so no update is possible before it is known",
    "optimizer.fused": 'use optimizer.implementation = "fused"',
    "lr_scheduler.lr_min": "use lr_scheduler.min_lr_factor",
    "checkpoint.interval_type": "checkpoint.interval counts steps",
    "checkpoint.*model_*only": "a checkpoint is always complete; initial_load_path reads the weights alone",
    "checkpoint.export_dtype": "weights are saved in training.dtype; `titanlite export-hf --dtype bfloat16` exports less",
    "checkpoint.create_seed_checkpoint": "initial weights are always the same on every mesh",
    "checkpoint.enable_first_step_checkpoint": "set checkpoint.interval; the last step is always saved",
    "checkpoint.enable_ft_dataloader_checkpoints": "every checkpoint stores the position in the data",
    "checkpoint.load_only": "set a checkpoint.interval larger than training.steps",
    "checkpoint.initial_load_in_hf_quantized": "config.json says whether weights are quantized",
    "metrics.save_for_all_ranks": "metrics are global, written by rank 0",
    "metrics.rank_0_only": "metrics are global, written by rank 0",
    "metrics.enable_wandb": _RECORDED,
    "metrics.disable_color_printing": "the console has no colors",
    "comm.mode": "use the command `titanlite estimate CONFIG --ranks N`",
    "comm.save_traces_*": "traces of collectives are in comm_traces in the run directory",
}
RENAMED = {
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
_FLOAT8 = ("float8", "quantize.linear.float8")  # of model.converters


def main() -> None:
    parser = command_parser("convert-config", __doc__)
    parser.add_argument("file", type=existing_path)
    parser.add_argument("--output", type=new_path)
    options = parser.parse_args()
    text = convert(read_toml(options.file))
    if options.output is None:
        print(text, end="")
        return
    unfinished = start_output(options.output)
    with writing(options.output):
        unfinished.write_text(text, encoding="utf-8")
        publish(unfinished, options.output)


def convert(theirs: dict[str, Any]) -> str:
    """The tables of torchtitan's file as the text of titanlite's."""
    ours: dict[str, dict[str, Any]] = {}
    settings: list[tuple[tuple[str, ...], Any, str]] = []  # names of tables and key, value, why titanlite cannot take it
    for path, value in _settings(theirs):
        key, meant = _renamed(".".join(path), value)
        section, _, name = key.partition(".")
        if key not in KEYS:
            settings.append((path, value, _reason(key, section)))
        elif name in ours.setdefault(section, {}):
            settings.append((path, value, f"another name of {key}, which is set too"))
        else:
            ours[section][name] = meant
            settings.append(((section, name), meant, ""))
    refused = _refused(ours)
    families = {module.name for module in iter_modules(models.__path__)}
    lines: dict[str, list[str]] = {section: [f"[{section}]"] for section in SECTIONS}
    for (section, *names), value, reason in settings:
        setting = f"{'.'.join(map(toml_key, names or [section]))} = {toml_value(value)}"
        if reason := reason or refused.get(f"{section}.{'.'.join(names)}", ""):
            setting = f"# {setting}  ({reason})"
        elif (section, *names) == ("model", "name") and "." not in value and value not in families:
            setting += "  # titanlite has no such family"
        lines.setdefault(section, [f"# [{toml_key(section)}]"]).append(setting)
    return "\n\n".join("\n".join(part) for part in lines.values() if len(part) > 1) + "\n"


def _settings(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names of the tables and the key, value) of every setting; a table can be the value of a key of titanlite."""
    for name, value in table.items():
        path = (*above, name)
        if isinstance(value, dict) and ".".join(path) not in KEYS:
            yield from _settings(value, path)
        else:
            yield path, value


def _renamed(key: str, value: Any) -> tuple[str, Any]:
    """A setting with titanlite's name and value, where they differ."""
    if key == "model.converters" and value in (*_FLOAT8, *([name] for name in _FLOAT8)):
        return "float8.enable", True
    if key == "activation_checkpoint.selective_ac_option" and isinstance(value, str) and value.isdecimal():
        return key, int(value)
    return RENAMED.get(key, key), value


def _reason(key: str, section: str) -> str:
    """Why titanlite has no such key, and what replaces it."""
    if instead := next((text for pattern, text in INSTEAD.items() if fnmatchcase(key, pattern)), ""):
        return instead
    if section not in SECTIONS:
        return "no such section"
    close = difflib.get_close_matches(key, KEYS, n=1)
    return f"no such key; did you mean {close[0]}?" if close else "no such key"


def _refused(ours: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The keys that titanlite would refuse in this file, or that would have no effect, each with the reason.

    Removes those whose value is wrong from `ours`.
    """
    refused: dict[str, str] = {}
    try:
        Config.model_validate(ours)
    except ValidationError as error:
        by_key: dict[tuple[Any, ...], list[Any]] = {}
        for entry in error.errors():
            by_key.setdefault(entry["loc"][:2], []).append(entry)
        for (section, name), errors in by_key.items():
            refused[f"{section}.{name}"] = f"must be {allowed(errors)}"
            del ours[section][name]
    idle = Config.model_validate(ours).idle(Hardware())
    return refused | {f"{key.section}.{key.name}": f"no effect unless {key.condition}" for key in idle}
