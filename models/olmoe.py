"""OLMoE (arXiv:2409.02060): everything about the family in one file.

The attention is that of OLMo 2, with queries and keys normalized over all heads together. The norms precede attention and
experts, as in Llama.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models.attention import SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, transformer_flops
from models.decoder import Decoder
from models.head import Head
from models.moe import Experts, MoE, Router, check_choice, experts_from_hf
from models.olmo2 import Attention
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
    n_experts: int = 64
    top_k: int = 8  # experts of a token
    normalised: bool = False  # whether the weights of a token's experts sum to 1
    vocab_size: int = 50_304
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)
        check_choice(self.n_experts, self.top_k)


# Published dimensions.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                dim layers heads kv head expert
    "debug": Config( 256,    4,    8,  8,  32,   128, n_experts=8, top_k=2, vocab_size=4096),
    "1b-7b": Config(2048,   16,   16, 16, 128,  1024),
}
# fmt: on


class Block(nn.Module):
    """One layer: attention and an MoE layer, each with a norm before it and a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn = MoE(Router(c.dim, c.n_experts, c.top_k, normalised=c.normalised), Experts(c.n_experts, c.dim, c.expert_dim))

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
        "layers.*.attention.[qk]_norm": "features",
        "layers.*.attention.wo": "row",
        "layers.*.ffn_norm": "replicate",  # router and experts read this rank's slice of the tokens
        "layers.*.ffn.router": "replicate",
        "layers.*.ffn.experts": "experts",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    Every matrix has deviation 0.02, truncated at three deviations, as in the paper.
    """
    return {"*norm.weight": Constant(1.0), "*": Normal(0.02)}


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length; of the experts, those that a token uses."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    matmul = c.n_layers * (attention + c.dim * c.n_experts + 3 * c.dim * c.expert_dim * c.top_k) + c.dim * c.vocab_size
    return transformer_flops(matmul, c.n_heads * c.head_dim, seq_len, [None] * c.n_layers)


# The model_types of config.json, and our parameter names -> those of OlmoeForCausalLM's files. {i} is the layer, {e} the
# expert: a tensor of each expert there is a part of one here.
HF_TYPES = ("olmoe",)
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.router.weight": "model.layers.{i}.mlp.gate.weight",
    "layers.{i}.ffn.experts.w1": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "layers.{i}.ffn.experts.w3": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "layers.{i}.ffn.experts.w2": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    act = json.get("hidden_act", "silu")
    if json.get("model_type") not in HF_TYPES or act != "silu":
        raise ValueError(f"not an OLMoE: model_type {json.get('model_type')!r}, activation {act!r}")
    theta, scaling = rope_from_hf(json)
    return Config(
        dim=json["hidden_size"],
        n_layers=json["num_hidden_layers"],
        n_heads=json["num_attention_heads"],
        n_kv_heads=json["num_key_value_heads"],
        head_dim=json.get("head_dim") or json["hidden_size"] // json["num_attention_heads"],
        expert_dim=json["intermediate_size"],
        n_experts=experts_from_hf(json),
        top_k=json["num_experts_per_tok"],
        normalised=json.get("norm_topk_prob", False),
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=json.get("tie_word_embeddings", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' OlmoeConfig reads it."""
    if config.n_heads * config.head_dim != config.dim:
        raise ValueError("Hugging Face's OLMoE has heads that are together as wide as the model: set n_heads x head_dim = dim")
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_dim,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.normalised,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        **rope_to_hf(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "clip_qkv": None,
    }
