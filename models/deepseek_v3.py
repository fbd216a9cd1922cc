"""DeepSeek-V3 (arXiv:2412.19437), and Moonlight and Kimi K2, which have its architecture: everything about it in one file.

Attention is multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are expanded
from one narrow latent, which is all that generation keeps. Feed-forward layers are MoE layers with a shared expert and a router
of sigmoids with a bias; the first layers are dense. Files' layers of multi-token prediction are left out.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import AttentionCore, SeqInfo, attend, with_mask
from models.blocks import Constant, Flops, Normal, RMSNorm, SwiGLU, apply_rope, gathered_like, transformer_flops, whole
from models.decoder import Decoder
from models.head import Head
from models.moe import Experts, MoE, Router, check_choice
from models.rope import RopeScaling, YarnScaling, check_scaling, rope_from_hf, rope_to_hf, rotation


@dataclass(frozen=True)
class Config:
    """Dimensions of one model. A head's queries and keys have a plain part and one with rotary positions."""

    dim: int
    n_layers: int
    n_heads: int
    q_rank: int | None  # the width of the latent of queries; None: they are projected from the hidden states
    kv_rank: int  # the width of the latent of keys and values
    ffn_dim: int  # the hidden width of dense layers
    expert_dim: int  # the hidden width of one expert
    n_experts: int
    top_k: int  # experts of a token
    dense_layers: int = field(default=1, metadata={"least": 0})  # so many first layers have no experts
    shared_experts: int = 1  # their widths added are that of the layer that every token uses
    plain_dim: int = 128  # the plain part of a head
    rope_dim: int = 64  # the rotary part, whose keys all heads share
    value_dim: int = 128
    groups: int = 1  # of experts
    top_groups: int = 1  # those from which the experts of a token are chosen
    scale: float = 1.0  # of the weights of a token's experts
    normalised: bool = True  # those weights, before that, sum to 1
    vocab_size: int = 129_280
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    interleaved: bool = True  # rotary dimensions 2i and 2i + 1 are a pair; False: i and i + rope_dim / 2
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        check_scaling(self.rope_scaling, self.rope_dim, self.rope_theta)
        check_choice(self.n_experts, self.top_k, self.groups, self.top_groups)
        if not 0 <= self.dense_layers < self.n_layers:
            raise ValueError(
                f"dense_layers = {self.dense_layers}: must be at least 0, and less than n_layers = {self.n_layers}"
            )
        if self.shared_experts < 1:
            raise ValueError(f"shared_experts = {self.shared_experts}: must be at least 1")

    @property
    def head_dim(self) -> int:
        """The width of a head's queries and keys."""
        return self.plain_dim + self.rope_dim

    @property
    def attention_scale(self) -> float:
        """The factor of the scores; YaRN's is applied to all of it, also to the plain part (DeepSeek-V2's published code)."""
        factor = 1.0
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_scaling.mscale_all_dim and self.rope_scaling.factor > 1:
            factor = 0.1 * self.rope_scaling.mscale_all_dim * math.log(self.rope_scaling.factor) + 1
        return self.head_dim**-0.5 * factor**2


_LATENT_EPS = 1e-6  # of the norms of latents, in DeepSeek's code and in transformers, whatever rms_norm_eps is
_YARN = YarnScaling(40.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
# Published dimensions.
# fmt: off
FLAVORS: dict[str, Config] = {
    #                         dim layers heads q_rank  kv    ffn expert experts top
    "debug":         Config( 256,    4,    8,   64,  32,   512,   128,    8,  2, vocab_size=4096,
                            plain_dim=16, rope_dim=16, value_dim=16, groups=4, top_groups=2, scale=2.5),
    "moonlight-16b": Config(2048,   27,   16, None, 512, 11264,  1408,   64,  6, shared_experts=2, scale=2.446,
                            vocab_size=163_840, norm_eps=1e-5, rope_theta=50_000.0),
    "671b":          Config(7168,   61,  128, 1536, 512, 18432,  2048,  256,  8, dense_layers=3, scale=2.5,
                            groups=8, top_groups=4, rope_scaling=_YARN),
    "kimi-k2":       Config(7168,   61,   64, 1536, 512, 18432,  2048,  384,  8, scale=2.827, vocab_size=163_840,
                            rope_theta=50_000.0, rope_scaling=_YARN._replace(factor=32.0, beta_fast=1.0)),
}
# fmt: on


class LatentAttention(AttentionCore):
    """Multi-head latent attention. Under tensor parallelism ranks gather the latents, and expand them into their own heads."""

    def __init__(self, config: Config):
        c = config
        super().__init__(c.n_heads, c.n_heads, c.head_dim, value_dim=c.value_dim, scale=c.attention_scale)
        self.parts, self.kv_parts = [c.plain_dim, c.rope_dim], [c.plain_dim, c.value_dim]
        self.latent_parts, self.interleaved = [c.kv_rank, c.rope_dim], c.interleaved
        self.low_rank = c.q_rank is not None
        if c.q_rank is None:
            self.q_input = nn.Identity()
            self.wq = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        else:
            self.wq_a = nn.Linear(c.dim, c.q_rank, bias=False)
            self.q_norm = RMSNorm(c.q_rank, _LATENT_EPS)
            self.wq_b = nn.Linear(c.q_rank, c.n_heads * c.head_dim, bias=False)
        self.wkv_a = nn.Linear(c.dim, sum(self.latent_parts), bias=False)
        self.kv_norm = RMSNorm(c.kv_rank, _LATENT_EPS)
        self.k_input = nn.Identity()
        self.wkv_b = nn.Linear(c.kv_rank, c.n_heads * sum(self.kv_parts), bias=False)
        self.wo = nn.Linear(c.n_heads * c.value_dim, c.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:  # x: this rank's slice of the tokens
        q = self.queries(x).unflatten(-1, (-1, self.head_dim))
        plain, rotated = q.split(self.parts, dim=-1)
        q = torch.cat([plain, self.rotate(rotated, rope)], dim=-1)
        latent, k_rope = self.wkv_a(x).split(self.latent_parts, dim=-1)
        latent, k_rope = self.kv_norm(latent), self.rotate(whole(self.k_input(k_rope))[:, :, None], rope)
        if seq.cache is None:
            return self.wo(self.core(q, *self.expand(latent, k_rope), seq).flatten(-2))
        narrow, k_rope = seq.cache.extend(self, whole(latent)[:, :, None], k_rope, seq.positions)
        k, v = self.expand(gathered_like(narrow[:, :, 0], latent), k_rope)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.wo(attend(q, k, v, seq.mask, self.scale, None).transpose(1, 2).flatten(-2))

    def queries(self, x: Tensor) -> Tensor:
        """This rank's heads of the whole sequence, (batch, seq, heads x head_dim)."""
        return self.wq_b(self.q_norm(self.wq_a(x))) if self.low_rank else self.wq(self.q_input(x))

    def expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's heads. latent: (batch, seq, kv_rank), gathered; k_rope: (batch, seq, 1, rope_dim)."""
        k, v = self.wkv_b(latent).unflatten(-1, (-1, sum(self.kv_parts))).split(self.kv_parts, dim=-1)
        return torch.cat([k, k_rope.expand(-1, -1, k.shape[2], -1)], dim=-1), v

    def rotate(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Positions for x (batch, seq, heads, rope_dim). Queries and keys may be permuted alike: their dot products stay."""
        if self.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rope(x, *rope)


class Block(nn.Module):
    """One layer: attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, config: Config, dense: bool):
        super().__init__()
        c = config
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = LatentAttention(c)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn = SwiGLU(c.dim, c.ffn_dim) if dense else _moe(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, seq)
        return x + self.ffn(self.ffn_norm(x))


def _moe(c: Config) -> MoE:
    router = Router(c.dim, c.n_experts, c.top_k, "sigmoid", c.normalised, c.scale, c.groups, c.top_groups, bias=True)
    return MoE(router, Experts(c.n_experts, c.dim, c.expert_dim), SwiGLU(c.dim, c.shared_experts * c.expert_dim))


class Model(Decoder):
    """The whole decoder."""

    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c, dense=i < c.dense_layers) for i in range(c.n_layers)})
        self.head = Head(RMSNorm(c.dim, c.norm_eps), c.dim, c.vocab_size)
        self.tie_weights()

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        """Hidden states (batch, seq, dim) for the head. x: tokens (batch, seq)."""
        c = self.config
        x = self.embed(x)
        seq = with_mask(seq)
        rope = rotation(seq, c.rope_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x = layer(x, rope, seq)
        return x


def sharding(config: Config) -> dict[str, str]:
    """How tensor parallelism splits each module: {pattern of module names: style}. Styles: docs/reference/styles.md."""
    queries = {"wq": "column", "q_input": "sequence"} if config.q_rank is None else {"wq_b": "column", "q_norm": "sequence"}
    dense = {"layers.*.ffn.w[13]": "column", "layers.*.ffn.w2": "row"} if config.dense_layers else {}
    return {
        "embed": "vocab",
        "layers.*.attention_norm": "replicate",  # latents are made from this rank's slice of the tokens
        "layers.*.attention.w*_a": "replicate",
        **{f"layers.*.attention.{name}": style for name, style in queries.items()},
        "layers.*.attention.kv_norm": "sequence",  # gathers the latents
        "layers.*.attention.k_input": "sequence",
        "layers.*.attention.wkv_b": "column",
        "layers.*.attention.wo": "row",
        **{f"layers.{i}.ffn_norm": "sequence" for i in range(config.dense_layers)},
        **dense,
        "layers.*.ffn_norm": "replicate",  # router and experts read this rank's slice of the tokens
        "layers.*.ffn.router": "replicate",
        "layers.*.ffn.experts": "experts",
        "layers.*.ffn.shared_input": "sequence",
        "layers.*.ffn.shared.w[13]": "column",
        "layers.*.ffn.shared.w2": "row",
        "head.norm": "sequence",
        "head.output": "vocab",
    }


def initial(config: Config) -> dict[str, Normal | Constant]:
    """Initial distribution of each parameter: {pattern of parameter names: distribution}; the first match counts.

    As in the report, section 4.2.
    """
    return {"*norm.weight": Constant(1.0), "layers.*.ffn.router.bias": Constant(0.0), "*": Normal(0.006)}


def flops(config: Config, seq_len: int) -> Flops:
    """Training FLOPs per token at a sequence length; of the experts, those that a token uses."""
    c = config
    per_head = c.head_dim * c.n_heads
    queries = c.dim * per_head if c.q_rank is None else c.q_rank * (c.dim + per_head)
    keys = c.dim * (c.kv_rank + c.rope_dim) + c.kv_rank * c.n_heads * (c.plain_dim + c.value_dim)
    attention = queries + keys + c.n_heads * c.value_dim * c.dim
    of_experts = c.dim * c.n_experts + 3 * c.dim * c.expert_dim * (c.top_k + c.shared_experts)
    matmul = c.n_layers * attention + (c.n_layers - c.dense_layers) * of_experts + c.dense_layers * 3 * c.dim * c.ffn_dim
    width = c.n_heads * (c.head_dim + c.value_dim) // 2  # the mean of keys and values
    return transformer_flops(matmul + c.dim * c.vocab_size, width, seq_len, [None] * c.n_layers)


# The model_types of config.json, and our parameter names -> those of DeepseekV3ForCausalLM's files. {i} is the layer, {e} the
# expert: a tensor of each expert there is a part of one here.
HF_TYPES = ("deepseek_v3", "kimi_k2")
HF: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wq_a.weight": "model.layers.{i}.self_attn.q_a_proj.weight",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_a_layernorm.weight",
    "layers.{i}.attention.wq_b.weight": "model.layers.{i}.self_attn.q_b_proj.weight",
    "layers.{i}.attention.wkv_a.weight": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{i}.attention.kv_norm.weight": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
    "layers.{i}.attention.wkv_b.weight": "model.layers.{i}.self_attn.kv_b_proj.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.ffn.w1.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.ffn.w3.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.ffn.w2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.ffn.router.weight": "model.layers.{i}.mlp.gate.weight",
    "layers.{i}.ffn.router.bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
    "layers.{i}.ffn.experts.w1": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "layers.{i}.ffn.experts.w3": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "layers.{i}.ffn.experts.w2": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    "layers.{i}.ffn.shared.w1.weight": "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
    "layers.{i}.ffn.shared.w3.weight": "model.layers.{i}.mlp.shared_experts.up_proj.weight",
    "layers.{i}.ffn.shared.w2.weight": "model.layers.{i}.mlp.shared_experts.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


def unused_in_hf(config: Config) -> tuple[str, ...]:
    """Patterns of tensors that published files have and this family leaves out: the layers of multi-token prediction."""
    return (f"model.layers.{config.n_layers}.*",)


_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}  # servers read the first two


def from_hf(json: dict[str, Any]) -> Config:
    """The configuration that a Hugging Face config.json describes. Raises ValueError for what this family does not support."""
    act = json.get("hidden_act", "silu")
    if json.get("model_type") not in HF_TYPES or act != "silu":
        raise ValueError(f"not a DeepSeek-V3: model_type {json.get('model_type')!r}, activation {act!r}")
    for key, only in _FIXED.items():
        if json.get(key, only) != only:
            raise ValueError(f"{key} = {json[key]!r}: only {only!r} is supported")
    if json.get("num_key_value_heads", json["num_attention_heads"]) not in (None, json["num_attention_heads"]):
        raise ValueError("num_key_value_heads differs from num_attention_heads; latents are expanded into as many heads")
    if (rotary := json.get("head_dim")) not in (None, json["qk_rope_head_dim"]):  # its name in transformers
        raise ValueError(f"head_dim = {rotary}: must be qk_rope_head_dim = {json['qk_rope_head_dim']}")
    for key in ("qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"):
        json.get(key)  # follows from other keys, or is of multi-token prediction
    for key in ("ep_size", "seq_aux", "aux_loss_alpha", "pretraining_tp"):
        json.get(key)  # say how the published model was trained
    json.get("auto_map")  # names code of the folder for libraries without the family; it is never run
    theta, scaling = rope_from_hf(json)
    return Config(
        dim=json["hidden_size"],
        n_layers=json["num_hidden_layers"],
        n_heads=json["num_attention_heads"],
        q_rank=json.get("q_lora_rank", 1536),  # null is none
        kv_rank=json["kv_lora_rank"],
        ffn_dim=json["intermediate_size"],
        expert_dim=json["moe_intermediate_size"],
        n_experts=json["n_routed_experts"],
        top_k=json["num_experts_per_tok"],
        dense_layers=json.get("first_k_dense_replace", 3),
        shared_experts=json["n_shared_experts"],
        plain_dim=json["qk_nope_head_dim"],
        rope_dim=json["qk_rope_head_dim"],
        value_dim=json["v_head_dim"],
        groups=json.get("n_group", 8) or 1,  # null is none
        top_groups=json.get("topk_group", 4) or 1,
        scale=json.get("routed_scaling_factor", 2.5),
        normalised=json.get("norm_topk_prob", True),
        vocab_size=json["vocab_size"],
        norm_eps=json["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        interleaved=json.get("rope_interleave", True),
        tied_embeddings=json.get("tie_word_embeddings", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The config.json of this configuration, as transformers' DeepseekV3Config reads it."""
    c = config
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_FIXED,
        "hidden_act": "silu",
        "hidden_size": c.dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_heads,
        "q_lora_rank": c.q_rank,
        "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.plain_dim,
        "qk_rope_head_dim": c.rope_dim,
        "v_head_dim": c.value_dim,
        "intermediate_size": c.ffn_dim,
        "moe_intermediate_size": c.expert_dim,
        "n_routed_experts": c.n_experts,
        "num_experts_per_tok": c.top_k,
        "n_shared_experts": c.shared_experts,
        "first_k_dense_replace": c.dense_layers,
        "n_group": c.groups,
        "topk_group": c.top_groups,
        "routed_scaling_factor": c.scale,
        "norm_topk_prob": c.normalised,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        **rope_to_hf(c.rope_theta, c.rope_scaling),
        "rope_interleave": c.interleaved,
        "tie_word_embeddings": c.tied_embeddings,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
