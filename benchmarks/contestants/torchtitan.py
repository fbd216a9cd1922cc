"""torchtitan's own Trainer and its `train_step`, with its llama3 model in our dimensions, with compiled blocks and loss.

On one device torchtitan does not apply FSDP2, and computes bfloat16 with autocast. Its tokenizer and data loader are left out:
`step` passes the batches to its `batch_generator`. It does not support CPUs: there the accelerator is set to "cpu", and its
device memory monitor, which only reports, is replaced by one that reports nothing.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._utils
from torch import Tensor

from benchmarks.contestants.job import Job, Unfit, interleaved, load

_ACCELERATOR = torch._utils._get_available_device_type
if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"
try:
    import torchtitan.train
    from torchtitan.components import metrics
    from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.protocols.train_spec import register_train_spec
finally:
    torch._utils._get_available_device_type = _ACCELERATOR

_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.": "",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


class _NoMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


class _Trainer(torchtitan.train.Trainer):
    loss: Tensor

    def forward_backward_step(self, **arguments: Any) -> Tensor:
        found = super().forward_backward_step(**arguments)
        self.loss = self.loss + found.detach()
        return found


def _model_args(job: Job) -> TransformerModelArgs:
    c = job.model
    if c.tied_embeddings:
        raise Unfit("its Llama does not tie embedding and output projection")
    if c.head_dim * c.n_heads != c.dim:
        raise Unfit("requires heads that together are as wide as the model")
    scaling = c.rope_scaling
    return TransformerModelArgs(
        dim=c.dim,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        vocab_size=c.vocab_size,
        # torchtitan computes the width of the feed-forward layer: a multiple of `multiple_of`, here the first one
        multiple_of=c.ffn_dim,
        ffn_dim_multiplier=1.5 / int(2 * 4 * c.dim / 3),
        norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        # torchtitan always scales RoPE: by 1 without scaling
        rope_scaling_args=RoPEScalingArgs(1.0)
        if scaling is None
        else RoPEScalingArgs(scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions),
        max_seq_len=job.seq,
    )


def _config(job: Job) -> JobConfig:
    config = JobConfig()
    values = {
        "job": {"dump_folder": f"{job.folder}/torchtitan"},
        "model": {"name": "throughput", "flavor": "job"},
        "training": {
            "local_batch_size": job.batch,
            "global_batch_size": job.batch * job.accumulate,
            "seq_len": job.seq,
            "max_norm": job.max_norm,
            "steps": 1_000_000,
            "dtype": "bfloat16" if job.precision == "bfloat16-pure" else "float32",
            "mixed_precision_param": "float32" if job.precision == "float32" else "bfloat16",
        },
        "optimizer": {
            "lr": job.lr,
            "beta1": job.beta1,
            "beta2": job.beta2,
            "eps": job.eps,
            "weight_decay": job.weight_decay,
            "implementation": "fused",
        },
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
        "activation_checkpoint": {"mode": job.recompute},
        "compile": {"enable": job.compiled, "components": ["model", "loss"]},
        "metrics": {"log_freq": 1_000_000},
    }
    for section, keys in values.items():
        for key, value in keys.items():
            assert hasattr(getattr(config, section), key), f"torchtitan has no {section}.{key}"
            setattr(getattr(config, section), key, value)
    return config


def _weights(job: Job, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights by torchtitan's names, in its rotary layout; compiled and recomputed blocks have one more name part."""
    c = job.model
    names = {re.sub(r"(_orig_mod|_checkpoint_wrapped_module)\.", "", name): name for name, _ in model.named_parameters()}
    for name, tensor in job.weights():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        heads = {"wq": c.n_heads, "wk": c.n_kv_heads}.get(name.split(".")[-2])
        yield names[name], tensor if heads is None else interleaved(tensor, heads)


def _build_optimizers(*arguments: Any, **named: Any) -> OptimizersContainer:
    """Its own optimizer, with norms in a group without decay."""
    container = build_optimizers(*arguments, **named)
    (optimizer,) = container
    (group,) = optimizer.param_groups
    parameters = group["params"]
    group["params"] = [p for p in parameters if p.ndim >= 2]
    optimizer.add_param_group({**group, "params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0})
    return container


def build(job: Job) -> Callable[[Tensor], Tensor]:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if job.device == "cpu":
        metrics.build_device_memory_monitor = _NoMonitor
    spec = get_train_spec()
    spec.model_args = {"job": _model_args(job)}
    spec.build_optimizers_fn = _build_optimizers
    spec.build_tokenizer_fn = spec.build_dataloader_fn = None
    register_train_spec("throughput", spec)
    trainer = _Trainer(_config(job))
    model = trainer.model_parts[0]
    load(model, _weights(job, model))

    def step(tokens: Tensor) -> Tensor:
        trainer.loss = torch.zeros((), device=tokens.device)
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(trainer.batch_generator([({"input": part[:, :-1]}, part[:, 1:]) for part in tokens]))
        return trainer.loss

    return step
