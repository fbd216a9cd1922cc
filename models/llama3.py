"""Llama 3, 3.1 and 3.2 (arXiv:2407.21783): everything about the family in one file. To fork it, copy it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models import mup
from models.attention import Attention, SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, SwiGLU, transformer_flops
from models.decoder import Decoder
from models.head import Head
from models.rope import Llama3Scaling, RopeScaling, check_scaling, rope_from_hf, rope_to_hf, rotation


@dataclass(frozen=True)
class Config:
    """Dimensions of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int = 128_256
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    mup_base_dim: int | None = None  # the width that muP's rates and initial weights are relative to; None: no muP

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)
        mup.check_base(self.mup_base_dim, self.tied_embeddings)


_SCALING_3_1 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
_SCALING_3_2 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)

# Published dimensions: 1b and 3b are Llama 3.2, the larger ones Llama 3.1; debugmodel is torchtitan's. 124m has GPT-2's, with
# the vocabulary rounded up.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                 dim  layers heads  kv  head    ffn
    "debug": Config(  256,     4,    8,   4,   32,   768, vocab_size=4096),
    "124m":  Config(  768,    12,   12,  12,   64,  2048, vocab_size=50_304, rope_theta=10_000.0, tied_embeddings=True),
    "1b":    Config( 2048,    16,   32,   8,   64,  8192, rope_scaling=_SCALING_3_2, tied_embeddings=True),
    "3b":    Config( 3072,    28,   24,   8,  128,  8192, rope_scaling=_SCALING_3_2, tied_embeddings=True),
    "8b":    Config( 4096,    32,   32,   8,  128, 14336, rope_scaling=_SCALING_3_1),
    "70b":   Config( 8192,    80,   64,   8,  128, 28672, rope_scaling=_SCALING_3_1),
    "405b":  Config(16384,   126,  128,   8,  128, 53248, rope_scaling=_SCALING_3_1),
    "debugmodel": Config(256,  6,   16,  16,   16,   768, vocab_size=2048, rope_scaling=_SCALING_3_1),
}
# fmt: on


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
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
        seq = with_mask(seq)  # once for all layers; AttentionCore.core uses it
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x = layer(x, rope, seq)
        return x


def sharding(config: Config) -> dict[str, str]:
    """How tensor parallelism splits each module: {pattern of module names: style}. Styles: docs/reference/styles.md."""
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention.w[qkv]": "column",
        "layers.*.attention.wo": "row",
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    The deviation is 0.02, and 0.02 / sqrt(2 L) for matrices that write to the residual stream, so that its variance does not
    grow with depth (GPT-2, Radford et al. 2019, section 2.3). Untied embeddings have deviation 1, because they train faster
    (the debug recipe after 80 steps: loss 5.1 instead of 6.1).
    """
    residual = Normal(0.02 / (2 * config.n_layers) ** 0.5)
    return {
        "embed.weight": Normal(0.02 if config.tied_embeddings else 1.0),
        "*norm.weight": Constant(1.0),
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


# The model_types of config.json, and our parameter names -> those of transformers' LlamaForCausalLM. {i} is the layer. A tied
# model has no head.output there.
HF_TYPES = ("llama",)
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.w1.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.ffn.w3.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.ffn.w2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support.

    titanlite refuses a key that this does not read, such as attention_bias, unless its value changes nothing.
    """
    act = json.get("hidden_act", "silu")
    if json.get("model_type") not in HF_TYPES or act != "silu":
        raise ValueError(f"not a Llama 3: model_type {json.get('model_type')!r}, activation {act!r}")
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
    """The config.json of this configuration, as transformers' LlamaConfig reads it."""
    if config.dim % config.n_heads:
        raise ValueError(f"dim = {config.dim}: Hugging Face's Llama needs one that n_heads = {config.n_heads} divides")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "mlp_bias": False,
    }
