"""Mixtral (arXiv:2401.04088): everything about the family in one file.

The block is Llama's with an MoE layer as its feed-forward layer.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models.attention import Attention, SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, transformer_flops
from models.decoder import Decoder
from models.head import Head
from models.moe import Experts, MoE, Router, check_choice, experts_from_hf
from models.rope import RopeScaling, check_scaling, rope_from_hf, rope_to_hf, rotation


@dataclass(frozen=True)
class Config:
    """Dimensions of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    expert_dim: int  # the hidden width of one expert
    n_experts: int = 8
    top_k: int = 2  # experts of a token
    vocab_size: int = 32_000
    norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)
        check_choice(self.n_experts, self.top_k)


# Published dimensions.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                dim layers heads kv head expert
    "debug": Config( 256,    4,    8,  4,  32,   128, vocab_size=4096),
    "8x7b":  Config(4096,   32,   32,  8, 128, 14336),
    "8x22b": Config(6144,   56,   48,  8, 128, 16384),
}
# fmt: on


class Block(nn.Module):
    """One layer: attention and an MoE layer, each with a norm before it and a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn = MoE(Router(c.dim, c.n_experts, c.top_k), Experts(c.n_experts, c.dim, c.expert_dim))

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
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention.w[qkv]": "column",
        "layers.*.attention.wo": "row",
        "layers.*.ffn_norm": "replicate",  # router and experts read this rank's slice of the tokens
        "layers.*.ffn.router": "replicate",
        "layers.*.ffn.experts": "experts",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    As in models/llama3.py, because the paper publishes none.
    """
    residual = Normal(0.02 / (2 * config.n_layers) ** 0.5)
    return {
        "embed.weight": Normal(0.02 if config.tied_embeddings else 1.0),
        "*norm.weight": Constant(1.0),
        "layers.*.attention.wo.weight": residual,
        "layers.*.ffn.experts.w2": residual,
        "*": Normal(0.02),
    }


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length; of the experts, those that a token uses."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    matmul = c.n_layers * (attention + c.dim * c.n_experts + 3 * c.dim * c.expert_dim * c.top_k) + c.dim * c.vocab_size
    return transformer_flops(matmul, c.n_heads * c.head_dim, seq_len, [None] * c.n_layers)


# The model_types of config.json, and our parameter names -> those of MixtralForCausalLM's files. {i} is the layer, {e} the
# expert: a tensor of each expert there is a part of one here.
HF_TYPES = ("mixtral",)
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
    "layers.{i}.ffn.experts.w1": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "layers.{i}.ffn.experts.w3": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    "layers.{i}.ffn.experts.w2": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    act = json.get("hidden_act", "silu")
    if json.get("model_type") not in HF_TYPES or act != "silu":
        raise ValueError(f"not a Mixtral: model_type {json.get('model_type')!r}, activation {act!r}")
    theta, scaling = rope_from_hf(json, default_base=1_000_000.0)
    return Config(
        dim=json["hidden_size"],
        n_layers=json["num_hidden_layers"],
        n_heads=json["num_attention_heads"],
        n_kv_heads=json["num_key_value_heads"],
        head_dim=json.get("head_dim") or json["hidden_size"] // json["num_attention_heads"],
        expert_dim=json["intermediate_size"],
        n_experts=experts_from_hf(json),
        top_k=json["num_experts_per_tok"],
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=json.get("tie_word_embeddings", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' MixtralConfig reads it."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_dim,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        **rope_to_hf(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "sliding_window": None,
    }
