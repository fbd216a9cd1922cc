"""A flat loop in plain PyTorch: the baseline that every framework must reach.

Its own Llama with scaled_dot_product_attention, autocast, cross entropy of materialized logits and fused AdamW; "plain" is
eager, "plain-compiled" has model and loss in one torch.compile.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.contestants.job import Job, load
from models import llama3
from models.rope import rope_frequencies


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    """Attention and feed-forward, with Hugging Face's names for the weights."""

    def __init__(self, c: llama3.Config):
        super().__init__()
        self.head_dim = c.head_dim
        self.input_layernorm, self.post_attention_layernorm = Norm(c.dim, c.norm_eps), Norm(c.dim, c.norm_eps)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.q_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.self_attn.k_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.self_attn.v_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.self_attn.o_proj = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)
        self.mlp.gate_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.mlp.up_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.mlp.down_proj = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part, normed = self.self_attn, self.input_layernorm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + part.o_proj(mixed.transpose(1, 2).flatten(-2))
        part, normed = self.mlp, self.post_attention_layernorm(x)
        return x + part.down_proj(F.silu(part.gate_proj(normed)) * part.up_proj(normed))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


class Llama(nn.Module):
    """Tokens and labels, both (batch, seq) -> the mean loss."""

    def __init__(self, c: llama3.Config, recompute: bool):
        super().__init__()
        self.config, self.recompute = c, recompute
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.model.layers = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.model.norm = Norm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def tie(self) -> None:
        if self.config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        c = self.config
        frequencies, _ = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, tokens.new_full((1,), tokens.shape[1]))
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute else block(x, cos, sin)
        logits = self.lm_head(self.model.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def model_of(job: Job) -> Llama:
    """The model with its initial weights."""
    with torch.device("meta"):
        model = Llama(job.model, job.recompute == "full").to(job.dtype)
    model.to_empty(device=job.device)
    model.tie()
    load(model, job.weights())
    return model


def build(job: Job) -> Callable[[Tensor], Tensor]:
    amp = job.amp
    model = model_of(job)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(job.decay_groups(model), **job.adamw())
    run = torch.compile(model) if job.compiled else model

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for part in tokens:
            with torch.autocast(job.device, amp, enabled=amp is not None):
                loss = run(part[:, :-1], part[:, 1:]) / len(tokens)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
