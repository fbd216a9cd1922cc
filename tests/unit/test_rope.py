"""RoPE scalings: tables of transformers, the round trip through config.json, and which values are refused.

tests/unit/hf/test_config_keys.py compares the logits of every family with each kind of scaling.
"""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models import llama3, olmo2, qwen3
from models.attention import SeqInfo
from models.rope import DynamicScaling, LongRopeScaling, RopeScaling, YarnScaling, rotation
from models.split import Split
from tests import tiny
from titanlite.config.read import Faults
from titanlite.config.schema import Config
from titanlite.inference.generate import Sampling, generate, score
from titanlite.loop.checks import check
from titanlite.registry.family import Family, load_family
from titanlite.transforms.initialize import materialize

_HEAD, _ORIGINAL = 64, 4096
_SHORT, _LONG = [1.0 + 0.01 * i for i in range(_HEAD // 2)], [1.0 + 0.3 * i for i in range(_HEAD // 2)]
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": _ORIGINAL}
_LONGROPE = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}
_LONGROPE |= {"original_max_position_embeddings": _ORIGINAL}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": _ORIGINAL}
TABLES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": _LLAMA3,
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": _YARN,
    "yarn, betas": {**_YARN, "beta_fast": 16, "beta_slow": 2.5},
    "yarn, equal betas": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "yarn, equal betas, not truncated": {**_YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn, not truncated": {**_YARN, "truncate": False},
    "yarn, attention_factor": {**_YARN, "attention_factor": 1.37},
    "yarn, mscales": {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn, factor of 1": {**_YARN, "factor": 1.0},
    "longrope": {**_LONGROPE, "factor": 8.0},
    "longrope, attention_factor": {**_LONGROPE, "attention_factor": 1.21},
    "longrope, factor of the lengths": _LONGROPE,
}


def _json(table: dict, **values: object) -> dict:
    """A config.json of a Llama with heads of 64, whose positions reach 8 times the original length."""
    c = llama3.Config(dim=128, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=_HEAD, ffn_dim=64, vocab_size=64)
    length = _ORIGINAL if table["rope_type"] == "dynamic" else 8 * _ORIGINAL
    return {**llama3.to_hf(c), "rope_scaling": table, "max_position_embeddings": length, **values}


def _their_tables(description: dict, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    description = copy.deepcopy(description)  # transformers changes it
    config = AutoConfig.for_model(description.pop("model_type"), **description)
    return LlamaRotaryEmbedding(config)(torch.empty(1), positions)


@pytest.mark.parametrize("length", [_ORIGINAL, _ORIGINAL + 1, 8 * _ORIGINAL])
@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_those_of_transformers(name, length):
    description = _json(TABLES[name])
    config = llama3.from_hf(description)
    positions = torch.arange(length)[None]
    found = rotation(SeqInfo(positions), _HEAD, config.rope_theta, config.rope_scaling)
    for ours, theirs in zip(found, _their_tables(description, positions), strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        # llama3 and dynamic are computed in another order: a rounding of a frequency, times the position
        tolerance = 1e-6 * (1 if name not in ("llama3", "dynamic") else max(1, length / 64))
        torch.testing.assert_close(ours[:, :, 0], theirs, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------- generation

_SMALL_ORIGINAL = 16
_SCALINGS: dict[str, RopeScaling] = {
    "longrope": LongRopeScaling((1.0, 1.1, 1.2, 1.3), (1.5, 3.0, 5.0, 7.0), _SMALL_ORIGINAL, factor=4.0),
    "dynamic": DynamicScaling(4.0, _SMALL_ORIGINAL),
}


def _model(scaling: RopeScaling) -> nn.Module:
    model = Family(tiny, dataclasses.replace(tiny.FLAVORS["plain"], rope_scaling=scaling)).on_meta()
    materialize(model, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)
    return model.eval()


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_generation_rotates_each_text_by_its_own_maximum_length(name):
    """A batch of a short and a long prompt, with the logits of one pass over the whole text."""
    model = _model(_SCALINGS[name])
    prompts, new = [[5, 6, 7], [i * 11 % 512 for i in range(30)]], 6
    together = generate(model, prompts, new, (), Sampling(temperature=0))
    for prompt, continued in zip(prompts, together, strict=True):
        assert generate(model, [prompt], new, (), Sampling(temperature=0)) == [continued]
        text = torch.tensor([[*prompt, *continued[:-1]]])
        with torch.no_grad():
            logits = model.head(model(text, SeqInfo(torch.arange(text.shape[1])[None])))
        assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == continued
        [(sum_of_logs, greedy)] = score(model, [(prompt, continued)])
        assert greedy
        chosen = logits[0, len(prompt) - 1 :].log_softmax(-1).gather(-1, torch.tensor(continued)[:, None])
        assert sum_of_logs == pytest.approx(chosen.sum().item(), abs=1e-4)


# ---------------------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("module", [llama3, qwen3, olmo2])
@pytest.mark.parametrize("name", TABLES)
def test_a_scaling_survives_a_round_trip_through_config_json(module, name):
    plain = dataclasses.replace(module.FLAVORS["debug"], head_dim=_HEAD)
    description = {**module.to_hf(plain), "rope_scaling": TABLES[name], "max_position_embeddings": 8 * _ORIGINAL}
    config = module.from_hf(json.loads(json.dumps(description)))
    exported = json.loads(json.dumps(module.to_hf(config)))
    assert exported["rope_scaling"].items() >= TABLES[name].items()
    assert module.from_hf({**description, **exported, "max_position_embeddings": 8 * _ORIGINAL}) == config
    if name == "dynamic":  # it is derived from the length outside of the table
        assert exported["max_position_embeddings"] == 8 * _ORIGINAL


def test_the_original_length_may_be_outside_of_the_table_or_default_to_the_maximum():
    """As in Phi 3's files; without any, transformers takes max_position_embeddings."""
    without = {name: value for name, value in _YARN.items() if name != "original_max_position_embeddings"}
    found = llama3.from_hf(_json(_YARN, original_max_position_embeddings=77)).rope_scaling
    assert found == YarnScaling(8.0, 77)
    assert llama3.from_hf(_json(without)).rope_scaling == YarnScaling(8.0, 8 * _ORIGINAL)


# -------------------------------------------------------------------------------------------------------------- training


def _configuration(tmp_path: Path, scaling: dict) -> Config:
    model = {"name": "tests.tiny", "flavor": "large", "overrides": {"rope_scaling": scaling}}
    return Config.model_validate({"job": {"dump_folder": str(tmp_path)}, "model": model, "training": {"seq_len": 64}})


def test_a_scaling_by_text_length_is_refused_only_for_training(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0, "max_positions": 16}
    with pytest.raises(Faults) as caught:
        check(_configuration(tmp_path, scaling), "run.toml", 1)
    assert "1 fault" in str(caught.value) and 'rope_scaling with rope_type = "dynamic"' in str(caught.value)
    check(_configuration(tmp_path, {"rope_type": "yarn", "factor": 4.0, "original_max_positions": 16}), "run.toml", 1)
    model = load_family("tests.tiny", "large", overrides={"rope_scaling": scaling}).on_meta()
    assert model.limits.generates


def test_in_training_seq_len_selects_the_longrope_factors_for_any_packing():
    """A document has the same rotation alone in a row and with others, in short and in long samples."""
    scaling = _SCALINGS["longrope"]
    for length in (_SMALL_ORIGINAL, 2 * _SMALL_ORIGINAL):
        alone = torch.arange(length)[None]
        packed = torch.cat([torch.arange(6), torch.arange(length - 6)])[None]
        tables = [rotation(SeqInfo(positions), 8, 1e4, scaling)[0] for positions in (alone, packed)]
        assert torch.equal(tables[0][0, :6], tables[1][0, :6])
        assert torch.equal(tables[0][0, : length - 6], tables[1][0, 6:])


def test_a_rank_with_half_of_a_sequence_has_the_factors_of_the_full_sequence():
    scaling, positions = _SCALINGS["longrope"], torch.arange(2 * _SMALL_ORIGINAL)[None]
    places = torch.arange(_SMALL_ORIGINAL) + 4
    split = Split(SimpleNamespace(size=lambda: 2), "gather", (0, 3), places)
    whole = rotation(SeqInfo(positions), 8, 1e4, scaling)[0]
    assert torch.equal(rotation(SeqInfo(positions[:, places], split=split), 8, 1e4, scaling)[0], whole[:, places])
