"""The config.json of a folder in Hugging Face's format: each of its keys is used, known to change nothing, or refused.

A family's `from_hf` reads its keys from a `Description`, which records them. Any other key may change the mathematics and is
refused by name, unless it is in HARMLESS or has a value in NEUTRAL.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, create_model, model_validator

from titanlite.config import bounds
from titanlite.ground.untrusted import MIB, FileSchema, Number, Positive, read_json

LIMIT = 16 * MIB  # enough for a million labels
# Keys that change no logits, by the source code of transformers 5.23: metadata, and defaults of training and generation.
_HARMLESS = """
architectures dtype torch_dtype transformers_version _name_or_path name_or_path _commit_hash tokenizer_class use_cache
initializer_range max_position_embeddings pretraining_tp return_dict output_hidden_states output_attentions torchscript
use_bfloat16 chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_autoset cache_implementation
id2label label2id num_labels problem_type finetuning_task task_specific_params bos_token_id eos_token_id pad_token_id
sep_token_id decoder_start_token_id unsloth_fixed unsloth_version max_length min_length do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
output_router_logits router_aux_loss_coef quantization_config is_llama_config transformers.js_config
max_sequence_length
"""  # quantization_config is validated below, and titanlite.hf uses it to dequantize weights
HARMLESS = frozenset(_HARMLESS.split())
_SWITCHES = """
attention_bias mlp_bias attention_dropout hidden_dropout residual_dropout embedding_dropout use_sliding_window
use_bidirectional_attention is_encoder_decoder add_cross_attention tie_encoder_decoder qkv_bias use_mrope rope_interleaved
"""
# For keys that a family does not read: the values that change nothing. Null changes nothing either; it means unset.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES.split(), (False,)),  # 0 is equal to False
    "partial_rotary_factor": (1,),
    "router_jitter_noise": (0,),
    "shared_expert_intermediate_size": (0,),
    "is_decoder": (False, True),
    "tie_last_hidden_states": (False, True),
    "pruned_heads": ({},),
}
# Bounds: at least ten times the dimensions of any published model.
_Layers = Annotated[int, Field(gt=0, le=2**12)]
_Heads = Annotated[int, Field(gt=0, le=2**14)]
_Experts = Annotated[int, Field(gt=0, le=2**14)]
_Width = Annotated[int, Field(gt=0, le=2**22)]
_Vocabulary = Annotated[int, Field(gt=0, le=2**24)]
_Positive = Annotated[Number, Field(gt=0), bounds.in_float32(1e-30, 1e30)]
_Factors = Annotated[list[_Positive], Field(max_length=2**21)]  # one for each pair of dimensions of the widest head
_UNSET: Any = None  # the default of a key that may be absent, but not null


class _Rope(FileSchema):
    """A RoPE table, or one such table for each kind of layer."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive = _UNSET
    factor: _Positive = _UNSET
    low_freq_factor: _Positive = _UNSET
    high_freq_factor: _Positive = _UNSET
    original_max_position_embeddings: Positive = _UNSET
    attention_factor: _Positive | None = None
    beta_fast: _Positive = _UNSET
    beta_slow: _Positive = _UNSET
    mscale: _Positive | None = None
    mscale_all_dim: _Positive | None = None
    truncate: bool = _UNSET
    short_factor: _Factors = _UNSET
    long_factor: _Factors = _UNSET
    full_attention: "_Rope | None" = None
    sliding_attention: "_Rope | None" = None


_Modules = Annotated[list[str], Field(max_length=2**17)] | None
_Side = Annotated[int, Field(gt=0, le=2**14)]  # of a quantization block


class _Quantization(BaseModel):
    """How weights are quantized. Other entries are refused. The dtypes in the files show which weights are quantized."""

    model_config = ConfigDict(strict=True, extra="forbid")

    quant_method: str
    modules_to_not_convert: _Modules = None
    modules_to_convert: _Modules = None
    dequantize: bool = _UNSET
    fmt: Literal["e4m3"] = _UNSET
    activation_scheme: Literal["dynamic"] = _UNSET
    scale_fmt: Literal["float", "ue8m0"] = _UNSET
    expert_dtype: Literal["fp8"] = _UNSET
    weight_block_size: Annotated[tuple[_Side, _Side], Strict(False)] = _UNSET

    @model_validator(mode="before")
    @classmethod
    def the_method_is_read(cls, values: Any) -> Any:
        method = values.get("quant_method") if isinstance(values, dict) else "fp8"
        if method not in ("fp8", "mxfp4"):
            what = 'must be "fp8" (float8 in blocks, as in DeepSeek-V3) or "mxfp4" (as in gpt-oss)'
            raise ValueError(f"quant_method = {json.dumps(method)}: {what}; convert other weights to bfloat16 first")
        return values

    @model_validator(mode="after")
    def the_method_has_its_entries(self) -> "_Quantization":
        of_float8 = self.model_fields_set & {"fmt", "activation_scheme", "scale_fmt", "expert_dtype", "weight_block_size"}
        if self.quant_method == "mxfp4" and of_float8:
            raise ValueError(f'{", ".join(sorted(of_float8))}: quant_method "mxfp4" has no such entry')
        if self.quant_method == "fp8" and "weight_block_size" not in of_float8:
            raise ValueError('quant_method "fp8" needs weight_block_size: only a scale for each block of a matrix is supported')
        return self


class _Dimensions(FileSchema):
    """Keys whose values must fit together."""

    model_type: str
    num_hidden_layers: _Layers = _UNSET
    num_attention_heads: _Heads = _UNSET
    num_key_value_heads: _Heads | None = None
    head_dim: _Width | None = None
    hidden_size: _Width = _UNSET
    layer_types: Annotated[list[str], Field(max_length=2**12)] | None = None

    @model_validator(mode="after")
    def dimensions_fit_together(self) -> "_Dimensions":
        heads, groups, size, dim = self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.hidden_size
        if heads and groups and heads % groups:
            raise ValueError(f"num_key_value_heads = {groups}: must divide num_attention_heads = {heads}")
        if size and size % 2:
            raise ValueError(f"head_dim = {size}: must be even, since RoPE rotates pairs of dimensions")
        if heads and dim and not size and dim % heads:
            raise ValueError(f"hidden_size = {dim}: without head_dim, must be divisible by num_attention_heads = {heads}")
        if self.layer_types is not None and self.num_hidden_layers not in (None, len(self.layer_types)):
            count = len(self.layer_types)
            raise ValueError(f"layer_types: has {count} entries, but num_hidden_layers = {self.num_hidden_layers}")
        return self


# The other keys that families read, by the type of their values. None is allowed where transformers treats null as unset.
_BY_TYPE: list[tuple[Any, str]] = [
    (_Width, "intermediate_size moe_intermediate_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (_Width | None, "q_lora_rank"),
    (_Experts, "num_experts num_local_experts num_experts_per_tok n_routed_experts n_shared_experts"),
    (_Experts | None, "n_group topk_group"),
    (_Vocabulary, "vocab_size"),
    (Annotated[int, Field(ge=0, le=2**12)], "first_k_dense_replace"),
    (Annotated[list[int], Field(max_length=2**12)] | None, "mlp_only_layers"),
    (
        Positive,
        "decoder_sparse_step moe_layer_freq sliding_window_pattern max_position_embeddings original_max_position_embeddings",
    ),
    (Positive | None, "sliding_window"),
    (
        _Positive,
        "rms_norm_eps rope_theta rope_local_base_freq routed_scaling_factor query_pre_attn_scalar swiglu_limit swiglu_alpha",
    ),
    (_Positive | None, "clip_qkv final_logit_softcapping attn_logit_softcapping"),
    (bool, "norm_topk_prob rope_interleave attention_bias mlp_bias tie_word_embeddings use_sliding_window"),
    (bool | None, "use_bidirectional_attention"),
    (str, "scoring_func topk_method"),
    (str | None, "hidden_act hidden_activation"),
    (_Rope | None, "rope_parameters rope_scaling"),
    (_Quantization | None, "quantization_config"),
]
_FIELDS: dict[str, Any] = {key: (kind, _UNSET) for kind, keys in _BY_TYPE for key in keys.split()}
_Model = create_model("_Model", __base__=_Dimensions, **_FIELDS)


class Description(dict[str, Any]):
    """The values of a config.json, or of a table in it. It records which of its keys have been read."""

    def __init__(self, values: dict[str, Any], path: Path):
        super().__init__({key: Description(value, path) if isinstance(value, dict) else value for key, value in values.items()})
        self.path = path
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """A value that must be present and not null."""
        self.used.add(key)
        if (value := super().__getitem__(key)) is None:
            raise KeyError(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)


def read_description(folder: Path) -> Description:
    """The config.json of a folder in Hugging Face's format. Raises UserError, also for values of a wrong type."""
    path = folder / "config.json"
    return Description(read_json(path, _Model, LIMIT), path)


def unused_keys(table: Description, family: str, above: str = "") -> Iterator[str]:
    """A sentence for each key that `from_hf` has not read and that may change the mathematics."""
    for key, value in table.items():
        neutral = NEUTRAL.get(key, ())
        if key in table.used and isinstance(value, Description):
            yield from unused_keys(value, family, f"{above}{key}.")
        elif not (key in table.used or value is None or key in HARMLESS or value in neutral):
            only = f"only {' and '.join(map(json.dumps, neutral))} or its absence" if neutral else "only its absence or null"
            yield f"{above}{key} = {json.dumps(value)}: {family} does not read this key; {only} is known to change nothing"
