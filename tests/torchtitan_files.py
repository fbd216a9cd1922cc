"""The keys and values of the 23 TOML files of torchtitan 0.2.2, but for job.description.

A letter of FILES stands for a file; a line of SETTINGS is a key, the files that set it, and its value there.
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
checkpoint.interval abcdefhklpqw 10
checkpoint.interval gmnorstv 500
checkpoint.interval ij 1000
checkpoint.interval u 50
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
encoder.max_t5_encoding_len hj 256
encoder.max_t5_encoding_len i 512
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
job.custom_config_module d "torchtitan.experiments.vlm.job_config"
job.custom_config_module hij "torchtitan.models.flux.job_config"
job.custom_config_module p "torchtitan.components.ft.config"
job.dump_folder abcdefghijklmnopqrstuvw "./outputs"
job.print_config adefghklpq false
job.print_config bc true
lr_scheduler.decay_ratio abcdefgklpq 0.8
lr_scheduler.decay_ratio hij 0.0
lr_scheduler.decay_type abcdeklpq "linear"
lr_scheduler.decay_type fg "cosine"
lr_scheduler.min_lr_factor abcdeklp 0.0
lr_scheduler.min_lr_factor fgqrs 0.1
lr_scheduler.warmup_steps abcdeklpqtw 2
lr_scheduler.warmup_steps fno 200
lr_scheduler.warmup_steps g 2000
lr_scheduler.warmup_steps h 1
lr_scheduler.warmup_steps ij 3000
lr_scheduler.warmup_steps mrsv 600
lr_scheduler.warmup_steps u 20
metrics.disable_color_printing abcdefghijklpq false
metrics.enable_tensorboard abcdefghijklpqrstuvw false
metrics.enable_tensorboard mno true
metrics.enable_wandb abcdefghijklpq false
metrics.log_freq abcdehklpqtw 1
metrics.log_freq fgmnorsuv 10
metrics.log_freq ij 100
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
model.hf_assets_path abceklpqw "./tests/assets/tokenizer"
model.hf_assets_path dh "tests/assets/tokenizer"
model.hf_assets_path f "./assets/hf/deepseek-moe-16b-base"
model.hf_assets_path g "./assets/hf/DeepSeek-V3.1-Base"
model.hf_assets_path m "./assets/hf/Llama-3.1-405B"
model.hf_assets_path n "./assets/hf/Llama-3.1-70B"
model.hf_assets_path o "./assets/hf/Llama-3.1-8B"
model.hf_assets_path r "./assets/hf/Llama-4-Maverick-17B-128E"
model.hf_assets_path s "./assets/hf/Llama-4-Scout-17B-16E"
model.hf_assets_path t "./assets/hf/Qwen3-0.6B"
model.hf_assets_path u "./assets/hf/Qwen3-1.7B"
model.hf_assets_path v "./assets/hf/Qwen3-32B"
model.name almnop "llama3"
model.name bc "transformers_modeling_backend"
model.name d "vlm"
model.name efg "deepseek_v3"
model.name hij "flux"
model.name k "gpt_oss"
model.name qrs "llama4"
model.name tuvw "qwen3"
optimizer.eps abcdefghijklmnoptuvw 1e-08
optimizer.eps qrs 1e-15
optimizer.lr abcdehklpuv 0.0008
optimizer.lr fg 0.00022
optimizer.lr ij 0.0001
optimizer.lr m 8e-05
optimizer.lr n 0.00015
optimizer.lr otw 0.0003
optimizer.lr qrs 0.004
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
profiling.enable_profiling abcdefghijklqrstuvw false
profiling.enable_profiling mnop true
profiling.profile_freq adefghiklpq 10
profiling.profile_freq bc 5
profiling.profile_freq jmnorstuvw 100
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
training.local_batch_size aeklnpqs 8
training.local_batch_size bcmv 2
training.local_batch_size di 32
training.local_batch_size fghtuw 4
training.local_batch_size j 64
training.local_batch_size or 1
training.max_norm abcdefgijklmnopqrstuvw 1.0
training.max_norm h 2.0
training.seq_len abceklpq 2048
training.seq_len dfgtuvw 4096
training.seq_len mnors 8192
training.steps abcdehklqtw 10
training.steps fno 1000
training.steps g 10000
training.steps ij 30000
training.steps mrsv 3000
training.steps pu 100
validation.all_timesteps hij false
validation.classifier_free_guidance_scale hij 5.0
validation.dataset abcklmnop "c4_validation"
validation.dataset hij "coco-validation"
validation.denoising_steps h 4
validation.denoising_steps ij 50
validation.enable abchijklmnop false
validation.enable_classifier_free_guidance hij true
validation.freq abchklp 5
validation.freq ij 1000
validation.freq mno 500
validation.local_batch_size h 8
validation.local_batch_size i 32
validation.local_batch_size j 64
validation.save_img_count h 1
validation.save_img_count ij 50
validation.save_img_folder hij "img"
validation.steps abcklp 10
validation.steps h 48
validation.steps i 12
validation.steps j 6
validation.steps mno 1200
"""


def settings(file: str) -> dict[str, object]:
    """The settings of a file, given by its letter: {"section.key": value}."""
    rows = [line.split(" ", 2) for line in SETTINGS.split("\n") if line]
    return {key: json.loads(value) for key, files, value in rows if file in files}


def toml(file: str) -> str:
    """A file as TOML text; every key with its whole name."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings(file).items())
