"""OLMo 2 (arXiv:2501.00656): everything about the family in one file.

The norms follow attention and feed-forward instead of preceding them. Queries and keys are normalized over all heads together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from models import attention
from models.attention import SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, SwiGLU, transformer_flops
from models.decoder import Decoder
from models.head import Head
from models.rope import RopeScaling, check_scaling, rope_from_hf, rope_to_hf, rotation


@dataclass(frozen=True)
class Config:
    """Dimensions of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int = 100_352
    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)


# Published dimensions.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                 dim layers heads kv head    ffn
    "debug": Config( 256,    4,    8,  8,  32,   768, vocab_size=4096),
    "1b":    Config(2048,   16,   16, 16, 128,  8192),
    "7b":    Config(4096,   32,   32, 32, 128, 11008),
    "13b":   Config(5120,   40,   40, 40, 128, 13824),
    "32b":   Config(5120,   64,   40,  8, 128, 27648),
}
# fmt: on


class WideNorm(RMSNorm):
    """RMSNorm over features that tensor parallelism splits: each rank has its own features; the mean square is over all."""

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, features of this rank) -> the same
        if not isinstance(self.weight, DTensor):
            return super().forward(x)
        mesh = self.weight.device_mesh
        whole: Any = DTensor.from_local(x, mesh, [Shard(-1)], run_check=False).float()
        square = whole.square().sum(-1, keepdim=True).redistribute(mesh, [Replicate()]) / whole.shape[-1]
        normed: Any = self.weight * (whole * torch.rsqrt(square + self.eps))
        return normed.to_local().type_as(x)


class Attention(attention.Attention):
    """Attention with one norm over the queries of all heads and one over the keys of all heads."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, norm_eps: float):
        super().__init__(dim, n_heads, n_kv_heads, head_dim)
        self.q_norm = WideNorm(n_heads * head_dim, norm_eps)
        self.k_norm = WideNorm(n_kv_heads * head_dim, norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_norm(self.wq(x))), self.split(self.k_norm(self.wk(x))), self.split(self.wv(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm after it and a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.attention_input = nn.Identity()  # tensor parallelism gathers the sequence here, where other families have a norm
        self.attention = Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn_input = nn.Identity()
        self.ffn = SwiGLU(c.dim, c.ffn_dim)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        x = x + self.attention_norm(self.attention(self.attention_input(x), rope, seq))
        return x + self.ffn_norm(self.ffn(self.ffn_input(x)))


class Model(Decoder):
    """The whole decoder."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.head = Head(RMSNorm(config.dim, config.norm_eps), config.dim, config.vocab_size)
        self.tie_weights()

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        """Hidden states (batch, seq, dim) for the head. x: tokens (batch, seq)."""
        c = self.config
        x = self.embed(x)
        seq = with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x = layer(x, rope, seq)
        return x


def sharding(config: Config) -> dict[str, str]:
    """How tensor parallelism splits each module: {pattern of module names: style}. Styles: docs/reference/styles.md."""
    return {
        "embed": "vocab",
        "layers.*.attention_input": "sequence",
        "layers.*.attention.w[qkv]": "column",
        "layers.*.attention.[qk]_norm": "features",
        "layers.*.attention.wo": "row",
        "layers.*.attention_norm": "replicate",  # each rank normalizes its slice of the tokens
        "layers.*.ffn_input": "sequence",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "layers.*.ffn_norm": "replicate",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    Every matrix has deviation 0.02 (section 3.2 of the report).
    """
    return {"*norm.weight": Constant(1.0), "*": Normal(0.02)}


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    matmul = c.n_layers * (attention + 3 * c.dim * c.ffn_dim) + c.dim * c.vocab_size
    return transformer_flops(matmul, c.n_heads * c.head_dim, seq_len, [None] * c.n_layers)


# The model_types of config.json, and our parameter names -> those of transformers' Olmo2ForCausalLM. {i} is the layer. A tied
# model has no head.output there.
HF_TYPES = ("olmo2",)
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.w1.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.ffn.w3.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.ffn.w2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    act = json.get("hidden_act", "silu")
    if json.get("model_type") not in HF_TYPES or act != "silu":
        raise ValueError(f"not an OLMo 2: model_type {json.get('model_type')!r}, activation {act!r}")
    theta, scaling = rope_from_hf(json)
    heads = json["num_attention_heads"]
    return Config(
        dim=json["hidden_size"],
        n_layers=json["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=json.get("num_key_value_heads") or heads,
        head_dim=json.get("head_dim") or json["hidden_size"] // heads,
        ffn_dim=json["intermediate_size"],
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=json.get("tie_word_embeddings", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' Olmo2Config reads it."""
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        **rope_to_hf(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
    }
