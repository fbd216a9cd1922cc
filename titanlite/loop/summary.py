"""Derived values for the start of the log: what a run does, in words and numbers."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.moe import Experts
from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.loop.resume import Progress, RunIdentity
from titanlite.optim.lr_schedule import Schedule
from titanlite.parallel.mesh import data_degree, mesh_title, needs_fsdp
from titanlite.parallel.pipeline import split_layers
from titanlite.registry.family import Family
from titanlite.registry.teacher import config_of_teacher
from titanlite.transforms.attention_kernels import attention_sentence
from titanlite.transforms.meta import on_meta, training_flops

_LARGE = 100_000_000  # parameters: no debug flavor has them


def built_in(config: Config, parameters: int) -> str:
    """One line if a large model reads the built-in data or its tokenizer, which is easily overlooked; else ""."""
    own, held_out = (
        each.dataset_path or each.sources or each.dataset != "stdlib" for each in (config.training, config.validation)
    )
    rows = (
        ("tokenizer", "model.hf_assets_path", config.model.hf_assets_path),
        ("data", "training.dataset_path", own),
        ("validation data", "validation.dataset_path", held_out or not own or not config.validation.enable),
    )
    parts = [(part, key) for part, key, given in rows if not given]
    if parameters < _LARGE or not parts:
        return ""
    names, keys = (" and ".join(words) for words in zip(*parts, strict=True))
    return f"{names}: a test of speed and memory, no useful result; set {keys}"


def emulated(dtype: str) -> str:
    """One remark where matrices of `dtype` are multiplied on a CPU without instructions for it; else ""."""
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available():
        return ""
    known = {"bfloat16": "bf16_on_cpu", "float16": "fp16_on_cpu"}
    if dtype not in known or getattr(torch_private, known[dtype])():
        return ""
    return f'; this CPU has no instructions for {dtype}: training.mixed_precision_param = "float32" is many times as fast'


def derived_values(
    run: RunIdentity, mesh: DeviceMesh, model: nn.Module, schedule: Schedule, progress: Progress
) -> dict[str, str]:
    """Derived values, for the start of the log: name -> sentence."""
    config, family, data, global_batch = run
    training = config.training
    split = f", sequences split by {config.parallelism.context_parallel_method}" if mesh["cp"].size() > 1 else ""
    flops, of_teacher = training_flops(family, config), config_of_teacher(config)
    whole = on_meta(family, config)  # of a pipeline, no rank has it
    total = sum(p.numel() for p in whole.parameters())
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    frozen = f", of which {trained:,} are trained" if trained < total else ""
    held = f", frozen weights {training.mixed_precision_param}" if config.lora.enable else ""
    rounding = f" with {config.optimizer.rounding} rounding" if training.dtype == "bfloat16" else ""
    masters = f"masters and moments {training.dtype}{rounding}"
    experts = ", experts do not" if any(isinstance(module, Experts) for module in model.modules()) else ""
    multiplied = f", blocks multiply in float8 {config.float8.recipe_name}{experts}" if config.float8.enable else ""
    degree = config.parallelism.expert_parallel_degree
    apart = f", experts split over {degree}" if degree > 1 else ""
    sharded = needs_fsdp(config, mesh.size())
    reduced = f", reduction {training.mixed_precision_reduce}" if sharded else ""
    reshard = config.parallelism.fsdp_reshard_after_forward
    cfg = config.activation_checkpoint
    chunked = f", feed-forward layers in {cfg.sequence_chunks} parts" if cfg.sequence_chunks > 1 else ""
    detail = {
        "full": chunked + (", inputs of blocks in host memory" if cfg.offload else ""),
        "selective": f": {cfg.selective_ac_option}",
        "memory_budget": f": {cfg.memory_budget:g}",
    }.get(cfg.mode, "")
    parts = ["blocks" if part == "model" else part for part in config.compile.components]
    compiled = f"{' and '.join(parts)} by {config.compile.backend}" if config.compile.enable else "nothing"
    float32_matmuls = {"highest": "exact", "high": "TF32", "medium": "bfloat16"}[torch.get_float32_matmul_precision()]
    decay = schedule.total_steps - schedule.decay_start
    stable = schedule.decay_start - schedule.warmup_steps
    return {
        "run": config.job.description or "(no description)",
        "folder": str(Path(config.job.dump_folder).resolve()),
        "model": f"{config.model.title}, {total:,} parameters{frozen}",
        **({"teacher": f"{of_teacher.model.name}, {config.distillation.teacher}"} if of_teacher else {}),
        **({"built in": note} if (note := built_in(config, total)) else {}),
        "mesh": mesh_title(mesh),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads a rank",
        "precision": f"{training.mixed_precision_param}{multiplied}, {masters}{held}{reduced}"
        + emulated(training.mixed_precision_param),
        "attention": attention_sentence(model, config) + split,
        "settings": f"garbage collected every {training.gc_freq} steps; float32 matmuls: {float32_matmuls}",
        "recomputed": "nothing" if cfg.mode == "none" else cfg.mode + detail,
        "compiled": compiled,
        "parameters": f"sharded over {mesh['dp_shard'].size() * mesh['cp'].size()}, reshard after forward: {reshard}{apart}"
        if sharded
        else "whole",
        **_stages(config, family, whole, config.microbatches(data_degree(mesh))),
        "global batch": f"{global_batch} sequences = {global_batch * training.seq_len:,} tokens a step",
        "local batch": f"{training.local_batch_size} sequences, {config.microbatches(data_degree(mesh))} microbatches a step",
        **data.derived_values(progress.timeline, max(progress.step, training.steps)),
        "schedule": f"{schedule.warmup_steps} warm-up, {stable} stable, {decay} {schedule.decay_type} decay to "
        f"{schedule.min_factor:g} x {schedule.lr:g}",
        "work": f"{flops.causal / 1e9:.3f} GFLOP a token causal, {flops.palm / 1e9:.3f} PaLM",
        "position": f"step {progress.step}, {progress.samples:,} samples consumed",
    }


def _stages(config: Config, family: Family, whole: Decoder, microbatches: int) -> dict[str, str]:
    """The blocks of a pipeline's stages, and its bubble. whole: the model on the meta device."""
    if (ranks := config.parallelism.pipeline_parallel_degree) == 1:
        return {}
    schedule = config.parallelism.pipeline_parallel_schedule
    sizes = [len(names) for names in split_layers(config, family, whole)]
    idle = (ranks - 1) / (len(sizes) // ranks * microbatches + ranks - 1)  # arXiv:2104.04473, section 2.2
    bubble = f"a bubble of {idle:.1%} of a step if stages take equally long"
    return {"pipeline": f"{schedule}, stages of {', '.join(map(str, sizes))} blocks; {bubble}"}
