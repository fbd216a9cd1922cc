"""Qwen 3 (arXiv:2505.09388) and Qwen 2 and 2.5 (arXiv:2412.15115): everything about the family in one file.

The block is Llama's. Qwen 3 normalizes the queries and keys of each head; Qwen 2 has biases for queries, keys and values.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models import attention, mup
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
    vocab_size: int = 151_936
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False  # Qwen 2: biases on queries, keys and values; no norms on queries and keys
    mup_base_dim: int | None = None  # the width that muP's rates and initial weights are relative to; None: no muP

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)
        mup.check_base(self.mup_base_dim, self.tied_embeddings)


# Published dimensions. Names with "2.5-" are Qwen 2.5.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                    dim layers heads kv head    ffn
    "debug":    Config( 256,    4,    8,  4,  32,   768, vocab_size=4096),
    "0.6b":     Config(1024,   28,   16,  8, 128,  3072, tied_embeddings=True),
    "1.7b":     Config(2048,   28,   16,  8, 128,  6144, tied_embeddings=True),
    "4b":       Config(2560,   36,   32,  8, 128,  9728, tied_embeddings=True),
    "8b":       Config(4096,   36,   32,  8, 128, 12288),
    "14b":      Config(5120,   40,   40,  8, 128, 17408),
    "32b":      Config(5120,   64,   64,  8, 128, 25600),
    "2.5-0.5b": Config( 896,   24,   14,  2,  64,  4864, qkv_bias=True, tied_embeddings=True),
    "2.5-1.5b": Config(1536,   28,   12,  2, 128,  8960, qkv_bias=True, tied_embeddings=True),
    "2.5-3b":   Config(2048,   36,   16,  2, 128, 11008, qkv_bias=True, tied_embeddings=True),
    "2.5-7b":   Config(3584,   28,   28,  4, 128, 18944, qkv_bias=True, vocab_size=152_064),
    "2.5-14b":  Config(5120,   48,   40,  8, 128, 13824, qkv_bias=True, vocab_size=152_064, norm_eps=1e-5),
    "2.5-32b":  Config(5120,   64,   40,  8, 128, 27648, qkv_bias=True, vocab_size=152_064, norm_eps=1e-5),
    "2.5-72b":  Config(8192,   80,   64,  8, 128, 29568, qkv_bias=True, vocab_size=152_064, norm_eps=1e-5),
}
# fmt: on


class Attention(attention.Attention):
    """Attention with a norm on the queries and keys of each head, or, in Qwen 2, with biases."""

    def __init__(self, config: Config):
        super().__init__(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, qkv_bias=config.qkv_bias)
        self.q_norm = None if config.qkv_bias else RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = None if config.qkv_bias else RMSNorm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q), self.k_norm(k), v


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, seq)
        return x + self.ffn(self.ffn_norm(x))


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
    norms = {} if config.qkv_bias else {"layers.*.attention.[qk]_norm": "replicate"}  # each rank normalizes its own heads
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention.w[qkv]": "column",
        **norms,
        "layers.*.attention.wo": "row",
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    As in models/llama3.py, because the reports publish none; biases start at 0.
    """
    residual = Normal(0.02 / (2 * config.n_layers) ** 0.5)
    biases = {"*.bias": Constant(0.0)} if config.qkv_bias else {}
    return {
        "embed.weight": Normal(0.02 if config.tied_embeddings else 1.0),
        "*norm.weight": Constant(1.0),
        **biases,
        "layers.*.attention.wo.weight": residual,
        "layers.*.ffn.w2.weight": residual,
        "*": Normal(0.02),
    }


# The matrices whose rates and initial weights follow the width under muP (models/mup.py), with mup_base_dim.
_HIDDEN = ("layers.*.attention.w?.weight", "layers.*.ffn.w?.weight")
_OUTPUTS = ("head.output.weight",)


def lr_scale(config: Config) -> dict[str, float]:
    """Factors on the learning rate: {pattern of parameter names: factor}; the first match counts."""
    return mup.rates(config.dim, config.mup_base_dim, _HIDDEN, _OUTPUTS)


def init_scale(config: Config) -> dict[str, float]:
    """Factors on the deviation of the initial weights, as `lr_scale`."""
    return mup.deviations(config.dim, config.mup_base_dim, _HIDDEN, _OUTPUTS)


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    matmul = c.n_layers * (attention + 3 * c.dim * c.ffn_dim) + c.dim * c.vocab_size
    return transformer_flops(matmul, c.n_heads * c.head_dim, seq_len, [None] * c.n_layers)


# The model_types of config.json, and our parameter names -> those of transformers' Qwen3ForCausalLM and Qwen2ForCausalLM. {i}
# is the layer. Names that a configuration does not use are ignored.
HF_TYPES = ("qwen3", "qwen2")
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.wq.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.wk.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.wv.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.w1.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.ffn.w3.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.ffn.w2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    act = json.get("hidden_act", "silu")
    if json.get("model_type") not in HF_TYPES or act != "silu":
        raise ValueError(f"not a Qwen 2 or 3: model_type {json.get('model_type')!r}, activation {act!r}")
    if {*(json.get("layer_types") or [])} - {"full_attention"}:
        raise ValueError(f"Qwen's sliding windows are not supported, but layer_types = {json['layer_types']}")
    for key in ("sliding_window", "max_window_layers"):
        json.get(key)  # no effect without use_sliding_window
    theta, scaling = rope_from_hf(json)
    heads = json["num_attention_heads"]
    older = json["model_type"] == "qwen2"
    return Config(
        dim=json["hidden_size"],
        n_layers=json["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=json.get("num_key_value_heads", 32) or heads,  # the default of transformers
        head_dim=json.get("head_dim") or (json["hidden_size"] // heads if older else 128),
        ffn_dim=json["intermediate_size"],
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=json.get("tie_word_embeddings", False),
        qkv_bias=older,
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' Qwen3Config or Qwen2Config reads it."""
    return {
        "architectures": ["Qwen2ForCausalLM" if config.qkv_bias else "Qwen3ForCausalLM"],
        "model_type": "qwen2" if config.qkv_bias else "qwen3",
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
        "use_sliding_window": False,
        "attention_bias": False,
    }
