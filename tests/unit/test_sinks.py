"""Attention sinks and clamped experts with biases, compared with their formulas."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from models import attention, gpt_oss
from models.attention import attend, block_mask, dense_mask

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 24, 16
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 24])
MASKS = {"causal": (None, None), "window": (None, 5), "documents": (DOCUMENTS, None), "both": (DOCUMENTS, 7)}


def inputs() -> list[Tensor]:
    """Queries, keys, values and sinks."""
    torch.manual_seed(0)
    shapes = [(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, requires_grad=True) for shape in (*shapes, (HEADS,))]


def by_hand(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """Query by query: exp(score) / (sum of exp(score) + exp(sink))."""
    results = torch.zeros(BATCH, HEADS, LENGTH, WIDTH)
    for row in range(BATCH):
        for head in range(HEADS):
            keys, values = (x[row, head // (HEADS // KV_HEADS)] for x in (k, v))
            for place in range(LENGTH):
                seen = [other for other in range(place + 1) if window is None or place - other < window]
                if documents is not None:
                    seen = [other for other in seen if documents[row, other] == documents[row, place]]
                powers = (keys[seen] @ q[row, head, place] / WIDTH**0.5).exp()
                results[row, head, place] = (powers[:, None] * values[seen]).sum(0) / (powers.sum() + sinks[head].exp())
    return results


@pytest.mark.parametrize("mask", MASKS)
def test_a_sink_takes_part_in_the_softmax_and_has_a_gradient(mask):
    documents, window = MASKS[mask]
    known = torch.zeros(BATCH, LENGTH, dtype=torch.int64) if documents is None else documents
    tensors, gradients = inputs(), torch.randn(BATCH, HEADS, LENGTH, WIDTH)
    q, k, v, sinks = tensors
    found = attend(q, k, v, None if mask == "causal" else dense_mask(known, window), None, None, sinks=sinks)
    expected = by_hand(q, k, v, sinks, documents, window)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(result, tensors, gradients) for result in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", MASKS)
def test_flex_attention_gets_its_sinks_from_the_log_sum_exp(monkeypatch, mask, softcap):
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex_attention)
    documents, window = MASKS[mask]
    known = torch.zeros(BATCH, LENGTH, dtype=torch.int64) if documents is None else documents
    q, k, v, sinks = (tensor.detach() for tensor in inputs())
    found = attend(q, k, v, block_mask(known, window), None, softcap, sinks=sinks)
    torch.testing.assert_close(found, attend(q, k, v, dense_mask(known, window), None, softcap, sinks=sinks))


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
