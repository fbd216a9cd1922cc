"""The model zoo: published sizes, FLOPs, Hugging Face configurations, windows and caches."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import deepseek_v3, gemma3, gpt_oss, llama3, mixtral, olmo2, olmoe, qwen3, qwen3_moe
from models.attention import SeqInfo
from tests.hf_folders import CASES
from titanlite.registry.family import Family, load_family

_BATCH, _SEQ = 2, 12
every_small_flavor = pytest.mark.parametrize(("name", "flavor"), CASES)


def _model(family: Family) -> nn.Module:
    model = family.module.Model(family.config)
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor, std=0.3)
    return model


def _tokens() -> tuple[torch.Tensor, SeqInfo]:
    torch.manual_seed(1)
    return torch.randint(512, (_BATCH, _SEQ)), SeqInfo(torch.arange(_SEQ).expand(_BATCH, _SEQ))


# ------------------------------------------------------------------------------------------------------ sizes and FLOPs


# The sums of the safetensors headers of the published weights. Gemma 3's 4b, 12b and 27b are published with an image encoder,
# 416,867,184 parameters and a matrix onto the text model's features, which are subtracted here.
def _of_text(total: int, dim: int) -> int:
    return total - 416_867_184 - 1152 * dim


_PUBLISHED = {
    llama3: {
        "debugmodel": 6_163_712,
        "124m": 50_304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768,
        "1b": 1_235_814_400,
        "3b": 3_212_749_824,
        "8b": 8_030_261_248,
        "70b": 70_553_706_496,
        "405b": 405_853_388_800,
    },
    qwen3: {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
        "2.5-0.5b": 494_032_768,
        "2.5-1.5b": 1_543_714_304,
        "2.5-3b": 3_085_938_688,
        "2.5-7b": 7_615_616_512,
        "2.5-14b": 14_770_033_664,
        "2.5-32b": 32_763_876_352,
        "2.5-72b": 72_706_203_648,
    },
    gemma3: {
        "270m": 268_098_176,
        "1b": 999_885_952,
        "4b": _of_text(4_300_079_472, 2560),
        "12b": _of_text(12_187_325_040, 3840),
        "27b": _of_text(27_432_406_640, 5376),
        "2-2b": 2_614_341_888,
        "2-9b": 9_241_705_984,
        "2-27b": 27_227_128_320,
    },
    olmo2: {"1b": 1_484_916_736, "7b": 7_298_617_344, "13b": 13_716_198_400, "32b": 32_234_279_936},
    qwen3_moe: {"30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560},
    mixtral: {"8x7b": 46_702_792_704, "8x22b": 140_620_634_112},
    olmoe: {"1b-7b": 6_919_161_856},
    deepseek_v3: {  # without multi-token prediction
        "moonlight-16b": 15_960_108_544,
        "671b": 671_026_404_352,
        "kimi-k2": 1_026_408_209_408,
    },
    # 20.91 and 116.83 billion in table 1 of arXiv:2508.10925; the files are quantized, so their headers have other sums
    gpt_oss: {"20b": 20_914_757_184, "120b": 116_829_156_672},
}


@pytest.mark.parametrize("module", _PUBLISHED)
def test_flavors_have_the_published_number_of_parameters(module):
    for flavor, parameters in _PUBLISHED[module].items():
        model = Family(module, module.FLAVORS[flavor]).on_meta()
        assert sum(p.numel() for p in model.parameters()) == parameters, flavor
        assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
        assert (model.head.output.weight is model.embed.weight) == module.FLAVORS[flavor].tied_embeddings
    assert module.FLAVORS.keys() - _PUBLISHED[module].keys() == {"debug"}


@every_small_flavor
def test_flops_equal_those_that_pytorch_counts(name, flavor):
    """Backward costs twice the forward pass; PyTorch counts attention over the whole sequence, as PaLM does."""
    family = load_family(name, flavor)
    model, (tokens, seq) = _model(family), _tokens()
    # the counter does not support the CPU's attention kernel; the plain one is made of matmuls
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.head(model(tokens, seq))
    assert family.module.flops(family.config, _SEQ).palm == 3 * counter.get_total_flops() / (_BATCH * _SEQ)


@every_small_flavor
def test_causal_flops_count_the_tokens_that_each_token_attends_to(name, flavor):
    module, c = load_family(name, flavor)
    found = module.flops(c, _SEQ)
    # forward and backward, multiply and add, scores and values
    a_pair = 3 * 2 * c.n_heads * (c.head_dim + getattr(c, "value_dim", c.head_dim))
    windows = [c.window_of(layer) if hasattr(c, "window_of") else None for layer in range(c.n_layers)]
    seen = sum(min(place, window or _SEQ) for window in windows for place in range(1, _SEQ + 1)) / _SEQ
    assert found.palm - found.causal == pytest.approx(a_pair * (_SEQ * c.n_layers - seen))
    assert module.flops(c, 1).palm == module.flops(c, 1).causal


# -------------------------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("module", _PUBLISHED)
def test_configurations_survive_a_round_trip_through_hugging_face(module):
    for config in module.FLAVORS.values():
        assert module.from_hf(json.loads(json.dumps(module.to_hf(config)))) == config


def test_gemmas_published_configurations_are_read():
    """The positions and layers in the files of gemma-3-1b, of gemma-3-12b's text model and of gemma-2-9b."""
    newer = ("rope_parameters", "layer_types")
    one, twelve, two = (
        {key: value for key, value in gemma3.to_hf(gemma3.FLAVORS[flavor]).items() if key not in newer}
        for flavor in ("1b", "12b", "2-9b")
    )
    bases = {"rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 6}
    assert gemma3.from_hf({**one, **bases, "rope_scaling": None}) == gemma3.FLAVORS["1b"]
    scaled = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert gemma3.from_hf({**twelve, **bases, **scaled}) == gemma3.FLAVORS["12b"]
    assert gemma3.from_hf({**two, "rope_theta": 10000.0}) == gemma3.FLAVORS["2-9b"]


def test_kimi_k2s_published_configuration_is_read():
    """Its config.json, without ids, names of code and quantization."""
    published = {
        **{"model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "hidden_act": "silu"},
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False},
        **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        **{"rms_norm_eps": 1e-6, "rope_theta": 50000.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 0},
        "rope_scaling": {
            **{"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    }
    assert deepseek_v3.from_hf(published) == deepseek_v3.FLAVORS["kimi-k2"]


@pytest.mark.parametrize(
    ("module", "flavor", "changes", "word"),
    [
        (gemma3, "debug", {"attention_softcap": 50.0}, "attention_softcap"),
        (gemma3, "2-2b", {"local_rope_theta": 500.0}, "one RoPE base"),
        (gemma3, "2-2b", {"n_heads": 12, "n_kv_heads": 4, "dim": 2048}, "n_heads = 12 divides"),
        (llama3, "1b", {"n_heads": 12, "n_kv_heads": 4}, "n_heads = 12 divides"),
        (olmoe, "debug", {"head_dim": 64}, "n_heads x head_dim = dim"),
    ],
)
def test_what_hugging_faces_model_of_the_type_lacks_is_not_exported(module, flavor, changes, word):
    with pytest.raises(ValueError, match=word):
        module.to_hf(dataclasses.replace(module.FLAVORS[flavor], **changes))


# ------------------------------------------------------------------------------------------------------------ the maths


@every_small_flavor
def test_a_window_with_documents_allows_what_both_allow(name, flavor):
    """The documents of a row give the same alone as packed, including windows."""
    model = _model(load_family(name, flavor))
    tokens, _ = _tokens()
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    found = model(tokens, SeqInfo(positions, documents))
    for row, first, last in ((0, 0, 5), (0, 5, 12), (1, 0, 12)):
        alone = model(tokens[row : row + 1, first:last], SeqInfo(torch.arange(last - first)[None]))
        torch.testing.assert_close(found[row, first:last], alone[0], rtol=1e-5, atol=1e-5)
