"""litgpt's own model and loss in the steps of its `litgpt pretrain` (litgpt/pretrain.py, `main` and `fit`) on Fabric.

The same as there: the whole model compiled, the loss in chunks outside of it, Fabric for precision, backward pass and clipping.
Different: fused AdamW on CPUs too, no decay of norms, and no loss read on the host at every step.
"""

from collections.abc import Callable, Iterator

import lightning
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer
from torch import Tensor

from benchmarks.contestants.fabric import precision_of
from benchmarks.contestants.job import Job, Unfit, load

_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.proj",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
}


def _config(job: Job) -> Config:
    c = job.model
    scaling = c.rope_scaling
    return Config(
        name="llama3",
        block_size=job.seq,
        n_layer=c.n_layers,
        n_embd=c.dim,
        vocab_size=c.vocab_size,
        padded_vocab_size=c.vocab_size,
        n_head=c.n_heads,
        n_query_groups=c.n_kv_heads,
        head_size=c.head_dim,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=c.norm_eps,
        mlp_class_name="LLaMAMLP",
        intermediate_size=c.ffn_dim,
        rope_base=int(c.rope_theta),
        rope_adjustments=None
        if scaling is None
        else {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_seq_len": scaling.original_max_positions,
        },
    )


def _weights(job: Job) -> Iterator[tuple[str, Tensor]]:
    """The weights by litgpt's names; it stores queries, keys and values of a layer in one matrix."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in job.weights():
        layer, _, kind = name.partition(".self_attn.")
        if kind in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            found = parts.setdefault(layer, {})
            found[kind[0]] = tensor
            if len(found) == 3:
                yield f"{layer.replace('model.layers', 'transformer.h')}.attn.qkv.weight", torch.cat([found[n] for n in "qkv"])
                parts.pop(layer)
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        yield name, tensor


def build(job: Job) -> Callable[[Tensor], Tensor]:
    if job.recompute != "none":
        raise Unfit("recomputes activations only with FSDP1")
    fabric = lightning.Fabric(accelerator=job.device, devices=1, precision=precision_of(job))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = GPT(_config(job))
    if job.model.tied_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    load(model, _weights(job))
    groups = job.decay_groups(model)
    model = fabric.setup(torch.compile(model) if job.compiled else model)
    optimizer = fabric.setup_optimizers(instantiate_torch_optimizer("AdamW", groups, **job.adamw()))

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for number, part in enumerate(tokens, 1):
            with fabric.no_backward_sync(model, enabled=number < len(tokens)):
                logits = model(part[:, :-1].contiguous())
                loss = chunked_cross_entropy(logits, part[:, 1:].contiguous()) / len(tokens)
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
