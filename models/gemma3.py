"""The text models of Gemma 3 (arXiv:2503.19786), and Gemma 2 (arXiv:2408.00118): everything about the family in one file.

Attention and feed-forward have a norm before and after them. Most layers are local: they attend to a window and have their own
RoPE base. Embeddings are scaled, and tied to the output projection. Gemma 2 caps scores and logits; Gemma 3 normalizes queries
and keys instead.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models import attention, blocks
from models.attention import SeqInfo, with_mask
from models.blocks import Constant, Flops, Normal, local_weight, transformer_flops
from models.decoder import Decoder
from models.head import Head
from models.rope import (
    DynamicScaling,
    LinearScaling,
    RopeScaling,
    YarnScaling,
    check_scaling,
    rope_from_hf,
    rope_to_hf,
    rotation,
    scaling_from_hf,
)


@dataclass(frozen=True)
class Config:
    """Dimensions of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    window: int  # tokens that a local layer attends to, including the current one
    vocab_size: int = 262_208
    norm_eps: float = 1e-6
    query_scalar: int = 256  # scores are divided by its square root
    rope_theta: float = 1_000_000.0  # global layers
    rope_factor: float = 1.0  # multiplies the RoPE wavelengths of global layers: a linear scaling
    rope_scaling: RopeScaling | None = None  # of global layers, if it is not linear
    local_rope_theta: float = 10_000.0
    global_every: int = 6  # every sixth layer is global, the others are local
    tied_embeddings: bool = True
    qk_norm: bool = True  # False: Gemma 2
    attention_softcap: float | None = None  # Gemma 2
    logits_softcap: float | None = None  # Gemma 2

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.head_dim, self.rope_theta)
        match self.rope_scaling:
            case LinearScaling():
                raise ValueError("rope_scaling: Gemma's linear scaling is rope_factor")
            case DynamicScaling() | YarnScaling(truncate=False):
                raise ValueError(
                    "rope_scaling: transformers' Gemma takes no dynamic scaling, and no YaRN with truncate = false"
                )
        if self.rope_scaling is not None and self.rope_factor != 1.0:
            raise ValueError(f"rope_factor = {self.rope_factor}: must be 1 beside another rope_scaling")

    @property
    def global_scaling(self) -> RopeScaling | None:
        """The RoPE scaling of global layers; local layers have none."""
        return self.rope_scaling if self.rope_factor == 1.0 else LinearScaling(self.rope_factor)

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer; None: the layer is global."""
        return None if (layer + 1) % self.global_every == 0 else self.window


_GEMMA_2: dict[str, Any] = {
    "window": 4096,
    "vocab_size": 256_000,
    "rope_theta": 10_000.0,
    "global_every": 2,
    "qk_norm": False,
    "attention_softcap": 50.0,
    "logits_softcap": 30.0,
}

# Published dimensions. Names with "2-" are Gemma 2.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                  dim layers heads kv head    ffn
    "debug":  Config( 256,    6,    8,  4,  32,   768, window=16, query_scalar=32, vocab_size=4096),
    "270m":   Config( 640,   18,    4,  1, 256,  2048, window=512, vocab_size=262_144),
    "1b":     Config(1152,   26,    4,  1, 256,  6912, window=512, vocab_size=262_144),
    "4b":     Config(2560,   34,    8,  4, 256, 10240, window=1024, rope_factor=8.0),
    "12b":    Config(3840,   48,   16,  8, 256, 15360, window=1024, rope_factor=8.0),
    "27b":    Config(5376,   62,   32, 16, 128, 21504, window=1024, rope_factor=8.0, query_scalar=168),
    "2-2b":   Config(2304,   26,    8,  4, 256,  9216, **_GEMMA_2),
    "2-9b":   Config(3584,   42,   16,  8, 256, 14336, **_GEMMA_2),
    "2-27b":  Config(4608,   46,   32, 16, 128, 36864, query_scalar=144, **_GEMMA_2),
}
# fmt: on


class RMSNorm(blocks.RMSNorm):
    """Root-mean-square normalization that scales by 1 + weight, all in float32."""

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        weight = 1.0 + local_weight(self.weight).float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)


class GeGLU(blocks.SwiGLU):
    """Gated feed-forward layer w2(gelu(w1 x) * w3 x), with the tanh approximation of GELU (Shazeer, arXiv:2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim) -> (batch, seq, dim)
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class Attention(attention.Attention):
    """Attention with a norm on the queries and keys of each head, or, in Gemma 2, with a softcap on the scores."""

    def __init__(self, config: Config):
        c = config
        scale = c.query_scalar**-0.5
        super().__init__(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, scale=scale, softcap=c.attention_softcap)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q), self.k_norm(k), v


class Block(nn.Module):
    """One layer: attention and feed-forward, each between two norms and with a residual connection."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.attention_post_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = GeGLU(config.dim, config.ffn_dim)
        self.ffn_post_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rope, seq))
        return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x)))


class Model(Decoder):
    """The whole decoder."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Head(norm, config.dim, config.vocab_size, config.logits_softcap)
        self.tie_weights()

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        """Hidden states (batch, seq, dim) for the head. x: tokens (batch, seq)."""
        c = self.config
        x = self.embed(x)
        x = x * x.new_full((), c.dim**0.5)  # the factor has x's precision, as in the training of the published weights
        plain = c.attention_softcap is None
        local_seq, global_seq = with_mask(seq, c.window, plain), with_mask(seq, plain=plain)
        local_rope = rotation(seq, c.head_dim, c.local_rope_theta)
        global_rope = rotation(seq, c.head_dim, c.rope_theta, c.global_scaling)
        for number, layer in self.layers.items():
            local = c.window_of(int(number)) is not None
            x = layer(x, local_rope if local else global_rope, local_seq if local else global_seq)
        return x


def sharding(config: Config) -> dict[str, str]:
    """How tensor parallelism splits each module: {pattern of module names: style}. Styles: docs/reference/styles.md."""
    norms = {"layers.*.attention.[qk]_norm": "replicate"} if config.qk_norm else {}  # each rank normalizes its own heads
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention.w[qkv]": "column",
        **norms,
        "layers.*.attention.wo": "row",
        "layers.*.attention_post_norm": "replicate",  # each rank normalizes its slice of the tokens
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "layers.*.ffn_post_norm": "replicate",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    The reports publish none. The deviation of the embeddings is chosen so that scaled embeddings and logits have deviation 1.
    """
    return {"embed.weight": Normal(config.dim**-0.5), "*norm.weight": Constant(0.0), "*": Normal(0.02)}


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    matmul = c.n_layers * (attention + 3 * c.dim * c.ffn_dim) + c.dim * c.vocab_size
    return transformer_flops(matmul, c.n_heads * c.head_dim, seq_len, [c.window_of(layer) for layer in range(c.n_layers)])


# The model_types of config.json, and our parameter names -> those of transformers' Gemma3ForCausalLM and Gemma2ForCausalLM. {i}
# is the layer. Names that a configuration does not use are ignored.
HF_TYPES = ("gemma3_text", "gemma2")
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention_post_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.ffn.w1.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.ffn.w3.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.ffn.w2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.ffn_post_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    kind, older = json.get("model_type"), json.get("model_type") == "gemma2"
    if kind == "gemma3":
        raise ValueError("a Gemma 3 with vision: only text models, of model_type 'gemma3_text', are supported")
    activations = {json.get(key) for key in ("hidden_activation", "hidden_act")} - {None, "gelu_pytorch_tanh"}
    if kind not in HF_TYPES or activations:
        raise ValueError(f"not a Gemma 2 or 3: model_type {kind!r}, activation {activations or 'gelu_pytorch_tanh'}")
    cap = json.get("attn_logit_softcapping", 50.0 if older else None)
    if cap and not older:
        raise ValueError(f"Gemma 3 has no softcap on scores, but config.json sets attn_logit_softcapping = {cap}")
    theta, local_theta, scaling = _rope_of(json, older)
    return Config(
        dim=json["hidden_size"],
        n_layers=json["num_hidden_layers"],
        n_heads=json["num_attention_heads"],
        n_kv_heads=json["num_key_value_heads"],
        head_dim=json["head_dim"],
        ffn_dim=json["intermediate_size"],
        window=json["sliding_window"],
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        query_scalar=json["query_pre_attn_scalar"],
        rope_theta=theta,
        rope_factor=float(scaling.factor) if isinstance(scaling, LinearScaling) else 1.0,
        rope_scaling=None if isinstance(scaling, LinearScaling) else scaling,
        local_rope_theta=local_theta,
        global_every=_pattern_of(json, older),
        tied_embeddings=json.get("tie_word_embeddings", True),
        qk_norm=not older,
        attention_softcap=cap,
        logits_softcap=json.get("final_logit_softcapping", 30.0 if older else None),
    )


def _rope_of(json: dict[str, Any], older: bool) -> tuple[float, float, RopeScaling | None]:
    """(RoPE base of global layers, RoPE base of local layers, scaling of global layers), from newer or older keys.

    As in transformers, a base in rope_parameters replaces the one outside of it.
    """
    if older:
        theta, scaling = rope_from_hf(json)
        if scaling is not None:
            raise ValueError(f"Gemma 2 does not scale RoPE, but config.json sets {scaling}")
        return theta, theta, None
    both = json.get("rope_parameters") or {}
    local_rope, global_rope = both.get(_LOCAL) or {}, both.get(_GLOBAL) or json.get("rope_scaling") or {}
    if scaling_from_hf(local_rope, json) is not None:
        raise ValueError(f"In Gemma only global layers scale RoPE, but config.json sets {local_rope} for local ones")
    theta, local_theta = json.get("rope_theta", 1e6), json.get("rope_local_base_freq", 1e4)
    scaling = scaling_from_hf(global_rope, json)
    return float(global_rope.get("rope_theta", theta)), float(local_rope.get("rope_theta", local_theta)), scaling


def _pattern_of(json: dict[str, Any], older: bool) -> int:
    """n, where every n-th layer is global."""
    layers, given = json["num_hidden_layers"], json.get("layer_types")
    for key in ("_sliding_window_pattern", "sliding_window_size"):
        json.get(key)  # no effect: files repeat layer_types and sliding_window
    every = 2 if older else json.get("sliding_window_pattern", 6)
    if given:
        every = given.index(_GLOBAL) + 1 if _GLOBAL in given else layers + 1
        if given != [_LOCAL if (i + 1) % every else _GLOBAL for i in range(layers)]:
            raise ValueError(f"Gemma's global layers are equally spaced, but config.json sets layer_types = {given}")
    return every


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' Gemma3TextConfig or Gemma2Config reads it."""
    c, older = config, not config.qk_norm
    if older and (c.rope_theta != c.local_rope_theta or c.global_scaling is not None):
        raise ValueError(
            "Gemma 2 has one RoPE base for all layers, and no scaling: set rope_theta = local_rope_theta, rope_factor = 1 and "
            "rope_scaling = None"
        )
    if not older and c.attention_softcap is not None:
        raise ValueError("Hugging Face's Gemma 3 has no softcap on scores: set attention_softcap = None")
    if c.dim % c.n_heads:
        raise ValueError(f"dim = {c.dim}: Hugging Face's Gemma needs one that n_heads = {c.n_heads} divides")
    return {
        "architectures": ["Gemma2ForCausalLM" if older else "Gemma3ForCausalLM"],
        "model_type": "gemma2" if older else "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        **({"hidden_act": "gelu_pytorch_tanh"} if older else {}),  # as published: what serves the model may read this key
        "hidden_size": c.dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn_dim,
        "sliding_window": c.window,
        "layer_types": [_LOCAL if c.window_of(layer) else _GLOBAL for layer in range(c.n_layers)],
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        "query_pre_attn_scalar": c.query_scalar,
        **rope_to_hf(c.rope_theta, c.global_scaling),
        # of the spacing of global layers, readers older than layer_types know the second key only
        **({} if older else {"rope_local_base_freq": c.local_rope_theta, "sliding_window_pattern": c.global_every}),
        "tie_word_embeddings": c.tied_embeddings,
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logits_softcap,
        "attention_bias": False,
    }
