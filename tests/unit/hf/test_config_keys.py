"""Each key of config.json is used as in transformers, changes nothing, or is refused by name."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models import deepseek_v3, gemma3, gpt_oss, llama3, mixtral, olmo2, olmoe, qwen3, qwen3_moe
from models.attention import SeqInfo
from tests.hf_folders import of_files, their_model
from titanlite.ground.errors import UserError
from titanlite.registry.family import Family
from titanlite.tools.open_model import recognize
from titanlite.transforms.initialize import materialize
from titanlite.verify.facts import stored_tensors_of, tensors_of_files

_SMALL = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab_size": 64}
_GEMMA = {**_SMALL, "window": 4, "query_scalar": 16}
_MIXTURE = {**{key: value for key, value in _SMALL.items() if key != "ffn_dim"}, "expert_dim": 16, "n_experts": 4, "top_k": 2}
_LATENT = {key: value for key, value in _SMALL.items() if key not in ("n_kv_heads", "head_dim")}
_LATENT |= {"q_rank": 12, "kv_rank": 8, "plain_dim": 6, "rope_dim": 8, "value_dim": 6}
_LATENT |= {"expert_dim": 16, "n_experts": 16, "top_k": 2, "groups": 8, "top_groups": 4, "dense_layers": 3}
_SCALING = llama3.Llama3Scaling(8.0, 1.0, 4.0, 16)
FAMILIES = {
    "llama": Family(llama3, llama3.Config(**_SMALL, rope_theta=5e3)),
    "llama scaled": Family(llama3, llama3.Config(**_SMALL, rope_scaling=_SCALING)),
    "qwen3": Family(qwen3, qwen3.Config(**_SMALL)),
    "qwen2": Family(qwen3, qwen3.Config(**_SMALL, qkv_bias=True)),
    "olmo2": Family(olmo2, olmo2.Config(**_SMALL)),
    "qwen3_moe": Family(qwen3_moe, qwen3_moe.Config(**_MIXTURE)),
    "mixtral": Family(mixtral, mixtral.Config(**_MIXTURE)),
    "olmoe": Family(olmoe, olmoe.Config(**_MIXTURE)),
    "deepseek_v3": Family(deepseek_v3, deepseek_v3.Config(**_LATENT)),
    "gpt_oss": Family(gpt_oss, gpt_oss.Config(**_MIXTURE, window=4)),
    "gemma2": Family(gemma3, gemma3.Config(**{**gemma3._GEMMA_2, **_GEMMA, "local_rope_theta": 1e4})),
    "gemma3": Family(gemma3, gemma3.Config(**_GEMMA, global_every=2, rope_factor=8.0)),
}
# Replacements of a value, and values of additional keys.
_ANY = [None, True, False, 0, 1, 2, 0.5, "0.5", "silu", [], {}, {"rope_type": "default", "rope_theta": 77.0}]
_TABLES = [
    {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    for kind in ("default", "linear", "llama3", "dynamic", "yarn")
]
_LENGTH = {"original_max_position_embeddings": 8}
_TABLES += [
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, **_LENGTH, "beta_fast": 2.0, "beta_slow": 0.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, **_LENGTH, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, **_LENGTH, "mscale": 1.0},
    {"rope_type": "longrope", "short_factor": [1, 1.5, 2, 3], "long_factor": [2, 4, 8, 9.0], **_LENGTH},
    {"rope_type": "longrope", "short_factor": [1, 1.5, 2, 3], "long_factor": [2, 4, 8, 9.0], **_LENGTH, "attention_factor": 2},
    {"rope_type": "longrope", "short_factor": [1, 1.5, 2], "long_factor": [2, 4, 8, 9.0], **_LENGTH, "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
]
_MORE = {
    "rope_theta": [10.0, 500000, "1e4"],
    "rope_local_base_freq": [10.0, 33],
    "rope_scaling": [*_TABLES, {"type": "linear", "factor": 4.0}, {"rope_theta": 9.0}],
    "rope_parameters": [*_TABLES, *({"full_attention": t} for t in _TABLES), *({"sliding_attention": t} for t in _TABLES)],
    "quantization_config": [{"quant_method": "fp8"}],
    "layer_types": [["full_attention"] * 4, ["sliding_attention"] * 4, ["full_attention", "sliding_attention"] * 2],
    "max_position_embeddings": [4, 16, 64],
    "original_max_position_embeddings": [4],
    "per_layer_config": [{"1": {"attention_dropout": 0.5}}],
    "rms_norm_eps": ["1e-5"],
    "num_experts_per_tok": [4, 5],
    "mlp_only_layers": [[0]],
}
# Additional keys of a description, with the values of _ANY.
_BESIDES = (
    *("partial_rotary_factor", "attention_dropout", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
    *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "embedding_multiplier"),
    *("num_experts", "num_local_experts", "norm_topk_prob", "decoder_sparse_step", "clip_qkv", "router_jitter_noise"),
    *("qkv_bias", "use_mrope", "rope_interleaved", "use_qk_norm", "sliding_window_size", "shared_expert_intermediate_size"),
)
_TOKENS = torch.arange(24).reshape(2, 12) * 5 % 64


def changes_of(description: dict) -> list[tuple[str, object]]:
    """(key, value) of every change; the value ... removes the key."""
    keys = {*description, *_BESIDES, *_MORE} - {"model_type"}
    return [(key, value) for key in sorted(keys) for value in (..., *_ANY, *_MORE.get(key, []))]


def theirs_with(weights: dict[str, Tensor], description: dict) -> Tensor | None:
    """The logits of transformers; None if it cannot build a model with these weights from the description."""
    try:
        description = copy.deepcopy(description)
        config = AutoConfig.for_model(description.pop("model_type"), **description)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float()
        if missing := model.load_state_dict(weights, strict=False).missing_keys:
            assert missing == ["lm_head.weight"] and config.tie_word_embeddings
        with torch.no_grad():
            return model.eval()(_TOKENS).logits
    except Exception:  # anything that its classes raise for an invalid description
        return None


def ours_with(weights: dict[str, Tensor], family: Family) -> Tensor:
    model = family.on_meta()
    materialize(model, torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in stored_tensors_of(model).items():
            tensor.copy_(of_files(family.module, name, tensor, weights))
        return model.head(model(_TOKENS, SeqInfo(torch.arange(12).expand(2, 12))))


def attack(folder: Path, name: str, share: float) -> tuple[int, int, list[str]]:
    """(changes with equal logits, refused changes, changes with other logits) in a random share of all changes."""
    family = FAMILIES[name]
    model = their_model(family)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    files = tensors_of_files(model)
    before = json.loads(model.config.to_json_string(use_diff=False))
    equal, refused, wrong = 0, 0, []
    generator = random.Random(name)
    for key, value in changes_of(before):
        if generator.random() > share:
            continue
        description = {**before, key: value}
        if value is ...:
            del description[key]
        (folder / "config.json").write_text(json.dumps(description))
        try:
            found = recognize(folder).family
        except UserError as error:
            assert str(folder / "config.json") in str(error)
            refused += 1
            continue
        if found.config.tied_embeddings != family.config.tied_embeddings:
            continue  # the check of the weights compares the two matrices
        if (theirs := theirs_with(weights, description)) is None:
            continue
        try:
            ours = ours_with(files, found)
        except RuntimeError:  # other shapes, which the check of the weights names
            continue
        near = torch.allclose(ours, theirs, atol=1e-4)
        equal += near
        wrong += [] if near else [f"{name}: {key} = {value}: {(ours - theirs).abs().max():.1e}"]
    return equal, refused, wrong


SHARES = [0.04, pytest.param(0.2, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.campaign)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_key_gives_the_logits_of_transformers_or_is_refused(tmp_path, name, share):
    equal, refused, wrong = attack(tmp_path, name, share)
    assert not wrong, "\n".join(wrong)
    assert equal > 100 * share - 1 and refused > 5


def test_a_missing_head_dim_of_gpt_oss_is_that_of_transformers(tmp_path):
    description = FAMILIES["gpt_oss"].to_hf() | {"num_attention_heads": 8, "num_key_value_heads": 4}
    del description["head_dim"]
    for more, width in ({}, AutoConfig.for_model("gpt_oss").head_dim), ({"head_dim": None}, description["hidden_size"] // 8):
        (tmp_path / "config.json").write_text(json.dumps(description | more))
        assert recognize(tmp_path).family.config.head_dim == width


def test_a_missing_rank_of_queries_is_that_of_transformers(tmp_path):
    """Without it, they were projected without a latent: another model, which a run without published weights trains."""
    description = FAMILIES["deepseek_v3"].to_hf()
    del description["q_lora_rank"]
    for more, rank in ({}, AutoConfig.for_model("deepseek_v3").q_lora_rank), ({"q_lora_rank": None}, None):
        (tmp_path / "config.json").write_text(json.dumps(description | more))
        assert recognize(tmp_path).family.config.q_rank == rank
