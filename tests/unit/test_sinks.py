"""Attention sinks of flex attention, and the published configuration; test_oracle.py compares with transformers."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from models import attention, gpt_oss
from models.attention import attend, block_mask, dense_mask

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 24, 16
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 24])
MASKS = {"window": (torch.zeros_like(DOCUMENTS), 5), "both": (DOCUMENTS, 7)}


@pytest.mark.parametrize(("mask", "softcap"), [("window", None), ("both", 2.0)])
def test_flex_attention_gets_its_sinks_from_the_log_sum_exp(monkeypatch, mask, softcap):
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex_attention)
    documents, window = MASKS[mask]
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    sinks = torch.randn(HEADS)
    found = attend(q, k, v, block_mask(documents, window), None, softcap, sinks=sinks)
    torch.testing.assert_close(found, attend(q, k, v, dense_mask(documents, window), None, softcap, sinks=sinks))


def test_the_published_configuration_is_read():
    """The config.json of gpt-oss-20b."""
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    published = {
        **{"model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu"},
        **{"hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "num_attention_heads": 64},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072},
        **{"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32},
        **{"rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088},
        **{"rope_scaling": {**scaling, "rope_type": "yarn", "truncate": False}, "tie_word_embeddings": False},
    }
    assert gpt_oss.from_hf(published) == gpt_oss.FLAVORS["20b"]
    without = {key: value for key, value in published.items() if key not in ("rope_scaling", "layer_types")}
    assert gpt_oss.from_hf(without) == gpt_oss.FLAVORS["20b"], "transformers' defaults"
