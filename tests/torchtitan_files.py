"""The keys of the 23 TOML files of torchtitan 0.2.2, except job.description, with values.

A letter of FILES means a file; a line of SETTINGS is a key, the files that set it, and its value there. Numbers, paths and
switches that are copied unchanged have the value of the first file in all files.
"""

import json

FILES = {
    "a": "base_config",
    "b": "transformers_modeling_backend/debug_model",
    "c": "transformers_modeling_backend/full",
    "d": "vlm/debug_model",
    "e": "deepseek_v3/debug_model",
    "f": "deepseek_v3/deepseek_v3_16b",
    "g": "deepseek_v3/deepseek_v3_671b",
    "h": "flux/debug_model",
    "i": "flux/flux_dev_model",
    "j": "flux/flux_schnell_model",
    "k": "gpt_oss/debug_model",
    "l": "llama3/debug_model",
    "m": "llama3/llama3_405b",
    "n": "llama3/llama3_70b",
    "o": "llama3/llama3_8b",
    "p": "llama3_ft/debug_model",
    "q": "llama4/debug_model",
    "r": "llama4/llama4_17bx128e",
    "s": "llama4/llama4_17bx16e",
    "t": "qwen3/qwen3_0.6b",
    "u": "qwen3/qwen3_1.7b",
    "v": "qwen3/qwen3_32b",
    "w": "qwen3/qwen3_moe_debug",
}
SETTINGS = """
activation_checkpoint.mode abcdefglopqtuw "selective"
activation_checkpoint.mode hijmnrsv "full"
activation_checkpoint.mode k "none"
activation_checkpoint.selective_ac_option abcdklp "2"
activation_checkpoint.selective_ac_option efgoqtuvw "op"
checkpoint.async_mode abcdefghijklmnopqrstuvw "disabled"
checkpoint.enable abcdefghijklmnopqrstuvw false
checkpoint.export_dtype abcdefghijklmnopqrs "float32"
checkpoint.export_dtype tuvw "float16"
checkpoint.folder abcdefghijklmnopqrstuvw "checkpoint"
checkpoint.interval abcdefghijklmnopqrstuvw 10
checkpoint.last_save_model_only abcdehklpqtuvw false
checkpoint.last_save_model_only fgijmnors true
comm.train_timeout_seconds p 15
compile.components abceklmnopqrstuvw ["model", "loss"]
compile.components fg ["loss"]
compile.enable abcdeklnopqrstuvw false
compile.enable fgm true
data.max_images_per_batch d 64
data.max_patches_per_image d 1024
encoder.autoencoder_path hij "assets/hf/FLUX.1-dev/ae.safetensors"
encoder.clip_encoder hij "openai/clip-vit-large-patch14"
encoder.max_t5_encoding_len hij 256
encoder.t5_encoder hij "google/t5-v1_1-xxl"
fault_tolerance.enable p true
fault_tolerance.num_fragments p 2
fault_tolerance.process_group p "nccl"
fault_tolerance.process_group_timeout_ms p 10000
fault_tolerance.semi_sync_method p "diloco"
fault_tolerance.sync_steps p 10
hf_transformers.model bc "Qwen/Qwen3-4B-Instruct-2507"
inference.local_batch_size h 2
inference.prompts_path h "./torchtitan/models/flux/inference/prompts.txt"
inference.save_img_folder h "inference_results"
job.custom_config_module dhijp "torchtitan.experiments.vlm.job_config"
job.dump_folder abcdefghijklmnopqrstuvw "./outputs"
job.print_config abcdefghklpq false
lr_scheduler.decay_ratio abcdefghijklpq 0.8
lr_scheduler.decay_type abcdeklpq "linear"
lr_scheduler.decay_type fg "cosine"
lr_scheduler.min_lr_factor abcdefgklpqrs 0.0
lr_scheduler.warmup_steps abcdefghijklmnopqrstuvw 2
metrics.disable_color_printing abcdefghijklpq false
metrics.enable_tensorboard abcdefghijklmnopqrstuvw false
metrics.enable_wandb abcdefghijklpq false
metrics.log_freq abcdefghijklmnopqrstuvw 1
metrics.save_tb_folder abcdefghijklmnopqrstuvw "tb"
model.converters m ["float8"]
model.flavor abdeklpq "debugmodel"
model.flavor c "full"
model.flavor f "16B"
model.flavor g "671B"
model.flavor h "flux-debug"
model.flavor i "flux-dev"
model.flavor j "flux-schnell"
model.flavor m "405B"
model.flavor n "70B"
model.flavor o "8B"
model.flavor r "17bx128e"
model.flavor s "17bx16e"
model.flavor t "0.6B"
model.flavor u "1.7B"
model.flavor v "32B"
model.flavor w "debugmodel_moe"
model.hf_assets_path abcdefghklmnopqrstuvw "./tests/assets/tokenizer"
model.name almnop "llama3"
model.name bc "transformers_modeling_backend"
model.name d "vlm"
model.name efg "deepseek_v3"
model.name hij "flux"
model.name k "gpt_oss"
model.name qrs "llama4"
model.name tuvw "qwen3"
optimizer.eps abcdefghijklmnopqrstuvw 1e-08
optimizer.lr abcdefghijklmnopqrstuvw 0.0008
optimizer.name abcdefghijklmnopqrstuvw "AdamW"
parallelism.context_parallel_degree abcdehlmnopqrstuv 1
parallelism.data_parallel_replicate_degree abcdefghijklmnopqrstuvw 1
parallelism.data_parallel_shard_degree abcdefghijklmnopqrstuvw -1
parallelism.enable_async_tensor_parallel abcdefgklpqrsw false
parallelism.enable_async_tensor_parallel m true
parallelism.expert_parallel_degree abcegkqrsw 1
parallelism.expert_parallel_degree f 8
parallelism.expert_tensor_parallel_degree abcefgkqw 1
parallelism.expert_tensor_parallel_degree rs 8
parallelism.fsdp_reshard_after_forward abcdefgklpqtuvw "default"
parallelism.pipeline_parallel_degree abcdefglmnopqs 1
parallelism.pipeline_parallel_degree r 4
parallelism.pipeline_parallel_schedule bceq "1F1B"
parallelism.pipeline_parallel_schedule fgl "Interleaved1F1B"
parallelism.tensor_parallel_degree abcdefgklopqtuvw 1
parallelism.tensor_parallel_degree mnrs 8
profiling.enable_memory_snapshot abcdefghijklpq false
profiling.enable_profiling abcdefghijklmnopqrstuvw false
profiling.profile_freq abcdefghijklmnopqrstuvw 10
profiling.profiler_active p 10
profiling.profiler_warmup p 0
profiling.save_memory_snapshot_folder abcdefghijklpq "memory_snapshot"
profiling.save_traces_folder abcdefghijklmnopqrstuvw "profile_trace"
quantize.grouped_mm.float8.fqns efgkq ["experts"]
quantize.grouped_mm.mx.fqns q ["experts"]
quantize.linear.float8.enable_fsdp_float8_all_gather abcefgklnopqrstuvw false
quantize.linear.float8.enable_fsdp_float8_all_gather m true
quantize.linear.float8.filter_fqns abclmnoptuvw ["output"]
quantize.linear.float8.filter_fqns efgkqrs ["output", "router.gate"]
quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp abcefgklnopqrstuvw false
quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp m true
quantize.linear.mx.filter_fqns qrs ["output", "router.gate"]
training.classifier_free_guidance_prob hij 0.447
training.dataset abeklpqw "c4_test"
training.dataset cfgmnorstuv "c4"
training.dataset d "cc12m"
training.dataset h "cc12m-test"
training.dataset ij "cc12m-wds"
training.dataset_path b "./tests/assets/c4_test"
training.img_size hij 256
training.local_batch_size abcdefghijklmnopqrstuvw 8
training.max_norm abcdefghijklmnopqrstuvw 1.0
training.seq_len abcdefgklmnopqrstuvw 2048
training.steps abcdefghijklmnopqrstuvw 10
validation.all_timesteps hij false
validation.classifier_free_guidance_scale hij 5.0
validation.dataset abchijklmnop "c4_validation"
validation.denoising_steps hij 4
validation.enable abchijklmnop false
validation.enable_classifier_free_guidance hij true
validation.freq abchijklmnop 5
validation.local_batch_size hij 8
validation.save_img_count hij 1
validation.save_img_folder hij "img"
validation.steps abchijklmnop 10
"""


def settings(file: str) -> dict[str, object]:
    """The settings of a file, given by its letter: {"section.key": value}."""
    rows = [line.split(" ", 2) for line in SETTINGS.split("\n") if line]
    return {key: json.loads(value) for key, files, value in rows if file in files}


def toml(file: str) -> str:
    """A file as TOML text; every key with its full name."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings(file).items())
