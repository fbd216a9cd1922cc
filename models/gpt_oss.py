"""OpenAI's gpt-oss (arXiv:2508.10925): everything about the family in one file.

Every other layer attends to a window. Each head has a sink: a learned score that takes part in the softmax without a value.
All projections have biases, also those of router and experts, and experts clamp what they multiply.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models import attention
from models.attention import SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, transformer_flops
from models.decoder import Decoder
from models.head import Head
from models.moe import Experts, MoE, Router, check_choice, experts_from_hf
from models.rope import RopeScaling, YarnScaling, check_scaling, rope_from_hf, rope_to_hf, rotation

_YARN = YarnScaling(32.0, 4096, truncate=False)


@dataclass(frozen=True)
class Config:
    """Dimensions of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    expert_dim: int  # the hidden width of one expert
    n_experts: int
    top_k: int = 4  # experts of a token
    window: int = 128  # tokens that a local layer attends to, including the current one
    vocab_size: int = 201_088
    norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    rope_scaling: RopeScaling | None = _YARN
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)
        check_choice(self.n_experts, self.top_k)

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer; None: the layer is global. The first is local, and so is every other one."""
        return self.window if layer % 2 == 0 else None


# Published dimensions.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                dim layers heads kv head  expert
    "debug": Config( 256,    4,    8,  4,  32,   128, n_experts=8, top_k=2, window=16, vocab_size=4096),
    "20b":   Config(2880,   24,   64,  8,  64,  2880, n_experts=32),
    "120b":  Config(2880,   36,   64,  8,  64,  2880, n_experts=128),
}
# fmt: on


class Attention(attention.Attention):
    """Attention with sinks, and with biases of all projections."""

    def __init__(self, config: Config):
        c = config
        super().__init__(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, qkv_bias=True, sinks=True)
        self.wo = nn.Linear(c.n_heads * c.head_dim, c.dim)


class Block(nn.Module):
    """One layer: attention and an MoE layer, each with a norm before it and a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        # the softmax over the chosen experts is that over all of them, normalized
        router = Router(c.dim, c.n_experts, c.top_k, logit_bias=True)
        self.ffn = MoE(router, Experts(c.n_experts, c.dim, c.expert_dim, "clamped_swiglu", bias=True))

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
        local_seq, global_seq = with_mask(seq, c.window, plain=False), with_mask(seq, plain=False)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for number, layer in self.layers.items():
            x = layer(x, rope, global_seq if c.window_of(int(number)) is None else local_seq)
        return x


def sharding(config: Config) -> dict[str, str]:
    """How tensor parallelism splits each module: {pattern of module names: style}. Styles: docs/reference/styles.md."""
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": "features",  # the sinks of this rank's heads
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

    As in models/qwen3_moe.py, because the report publishes none. A sink of 0 is as large as the score of an average key.
    """
    residual = Normal(0.02 / (2 * config.n_layers) ** 0.5)
    return {
        "embed.weight": Normal(0.02 if config.tied_embeddings else 1.0),
        "*norm.weight": Constant(1.0),
        "*bias": Constant(0.0),
        "layers.*.attention.sinks": Constant(0.0),
        "layers.*.attention.wo.weight": residual,
        "layers.*.ffn.experts.w2": residual,
        "*": Normal(0.02),
    }


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length; of the experts, those that a token uses."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    matmul = c.n_layers * (attention + c.dim * c.n_experts + 3 * c.dim * c.expert_dim * c.top_k) + c.dim * c.vocab_size
    return transformer_flops(matmul, c.n_heads * c.head_dim, seq_len, [c.window_of(layer) for layer in range(c.n_layers)])


# The model_types of config.json, and our parameter names -> those of GptOssForCausalLM's files. {i} is the layer. There, the
# matrices of experts are transposed (.mT), and columns of w1 and w3 alternate in one tensor ([0::2], [1::2]).
HF_TYPES = ("gpt_oss",)
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wq.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wk.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.wv.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.wo.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.router.weight": "model.layers.{i}.mlp.router.weight",
    "layers.{i}.ffn.router.logit_bias": "model.layers.{i}.mlp.router.bias",
    "layers.{i}.ffn.experts.w1": "model.layers.{i}.mlp.experts.gate_up_proj[0::2].mT",
    "layers.{i}.ffn.experts.w3": "model.layers.{i}.mlp.experts.gate_up_proj[1::2].mT",
    "layers.{i}.ffn.experts.w2": "model.layers.{i}.mlp.experts.down_proj.mT",
    "layers.{i}.ffn.experts.w1_bias": "model.layers.{i}.mlp.experts.gate_up_proj_bias[0::2]",
    "layers.{i}.ffn.experts.w3_bias": "model.layers.{i}.mlp.experts.gate_up_proj_bias[1::2]",
    "layers.{i}.ffn.experts.w2_bias": "model.layers.{i}.mlp.experts.down_proj_bias",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_KINDS = ("sliding_attention", "full_attention")  # of layers, in turn
_FIXED = {"attention_bias": True, "hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    if json.get("model_type") not in HF_TYPES:
        raise ValueError(f"not a gpt-oss: model_type {json.get('model_type')!r}")
    for key, value in _FIXED.items():
        if json.get(key, value) != value:
            raise ValueError(f"{key} = {json[key]!r}: gpt-oss has {value!r}")
    layers = json["num_hidden_layers"]
    kinds = [_KINDS[layer % 2] for layer in range(layers)]
    if (json.get("layer_types") or kinds) != kinds:
        raise ValueError(f"gpt-oss has a {_KINDS[0]} and a {_KINDS[1]} in turn, but layer_types = {json['layer_types']}")
    for key in ("experts_per_token", "initial_context_length"):
        json.get(key)  # no effect: the published files repeat num_experts_per_tok and the original length of YaRN
    theta, scaling = rope_from_hf(json, 150_000.0)
    if not json.get("rope_scaling") and json.get("rope_parameters") is None:
        scaling = _YARN  # the default of transformers; an empty table means none
    return Config(
        dim=json["hidden_size"],
        n_layers=layers,
        n_heads=json["num_attention_heads"],
        n_kv_heads=json["num_key_value_heads"],
        head_dim=json.get("head_dim", 64) or json["hidden_size"] // json["num_attention_heads"],
        expert_dim=json["intermediate_size"],
        n_experts=experts_from_hf(json),
        top_k=json["num_experts_per_tok"],
        window=json["sliding_window"],
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=json.get("tie_word_embeddings", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' GptOssConfig reads it."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **_FIXED,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_dim,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "sliding_window": config.window,
        "layer_types": [_KINDS[layer % 2] for layer in range(config.n_layers)],
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        **rope_to_hf(config.rope_theta, config.rope_scaling),
        **({"rope_scaling": {"rope_type": "default"}} if config.rope_scaling is None else {}),  # not transformers' default
        "tie_word_embeddings": config.tied_embeddings,
    }
