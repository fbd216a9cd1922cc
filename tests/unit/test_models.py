"""The model zoo: published sizes, FLOPs, Hugging Face configurations, stages, and what the folder may import."""

import ast
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import models
from models import llama3
from models.blocks import RopeScaling, SeqInfo, apply_rope, rope_frequencies, rope_tables
from titanlite.zoo import Family

_CONFIG = llama3.Config(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48, vocab_size=64)
_BATCH, _SEQ = 2, 12


def _model(config: llama3.Config = _CONFIG) -> llama3.Model:
    model = llama3.Model(config)
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def _tokens() -> tuple[torch.Tensor, SeqInfo]:
    torch.manual_seed(1)
    return torch.randint(_CONFIG.vocab_size, (_BATCH, _SEQ)), SeqInfo(torch.arange(_SEQ).expand(_BATCH, _SEQ))


# ------------------------------------------------------------------------------------------------------ sizes and FLOPs


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_flavours_have_the_published_number_of_parameters(flavor, parameters):
    model = Family(llama3, llama3.FLAVORS[flavor]).on_meta()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert (model.head.output.weight is model.embed.weight) == (flavor in ("1b", "3b"))


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 4}, {"n_heads": 6, "head_dim": 8}, {"tied_embeddings": True}])
def test_flops_equal_those_that_pytorch_counts(changes):
    """Backward costs twice the forward pass; PyTorch counts attention over the whole sequence, as PaLM does."""
    config = dataclasses.replace(_CONFIG, **changes)
    model, (tokens, seq) = _model(config), _tokens()
    # the counter knows no CPU attention kernel; the plain one is made of matrix products
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.head(model(tokens, seq))
    assert llama3.flops(config, _SEQ).palm == 3 * counter.get_total_flops() / (_BATCH * _SEQ)


def test_causal_flops_count_what_each_token_sees():
    c, found = _CONFIG, llama3.flops(_CONFIG, _SEQ)
    a_pair = 3 * 2 * 2 * c.n_layers * c.n_heads * c.head_dim  # forward and backward, multiply and add, scores and values
    seen = sum(range(1, _SEQ + 1)) / _SEQ
    assert found.palm - found.causal == pytest.approx(a_pair * (_SEQ - seen))
    assert llama3.flops(_CONFIG, 1).palm == llama3.flops(_CONFIG, 1).causal


# -------------------------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("flavor", llama3.FLAVORS)
def test_configurations_survive_the_way_to_hugging_face_and_back(flavor):
    config = llama3.FLAVORS[flavor]
    assert llama3.from_hf(json.loads(json.dumps(llama3.to_hf(config)))) == config


def test_the_older_and_the_newer_spelling_of_rope_are_read():
    config = llama3.FLAVORS["8b"]
    older = llama3.to_hf(config)
    newer = {key: value for key, value in older.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_theta": 500000, **older["rope_scaling"]}
    assert llama3.from_hf(newer) == config
    plain = llama3.to_hf(_CONFIG)
    assert llama3.from_hf({**plain, "rope_scaling": {"type": "default"}}) == _CONFIG
    assert llama3.from_hf({key: value for key, value in plain.items() if key != "head_dim"}).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_the_family_does_not_have_is_refused(changes, word):
    with pytest.raises(ValueError, match=word):
        llama3.from_hf({**llama3.to_hf(_CONFIG), **changes})


@pytest.mark.parametrize("flavor", ["debug", "1b"])
def test_every_parameter_has_a_hugging_face_name(flavor):
    names = {name for name, _ in Family(llama3, llama3.FLAVORS[flavor]).on_meta().named_parameters()}
    layers = range(llama3.FLAVORS[flavor].n_layers)
    covered = {name.replace("{i}", str(i)) for name in llama3.HF for i in layers}
    assert names == covered - ({"head.output.weight"} if flavor == "1b" else set())
    assert len(set(llama3.HF.values())) == len(llama3.HF)


# ------------------------------------------------------------------------------------------------------------ the maths


def _stage(first: int, last: int, embed: bool, head: bool) -> llama3.Model:
    """Layers first..last-1 of the whole model, under the keys they have there."""
    model = _model()
    if not embed:
        model.embed = None
    if not head:
        model.head = None
    for key in list(model.layers):
        if not first <= int(key) < last:
            del model.layers[key]
    return model


def test_two_stages_compose_to_the_whole_model():
    whole, (tokens, seq) = _model(), _tokens()
    first, second = _stage(0, 3, embed=True, head=False), _stage(3, 4, embed=False, head=True)
    hidden = second(first(tokens, seq), seq)
    assert torch.equal(hidden, whole(tokens, seq))
    assert torch.equal(second.head(hidden, tokens), whole.head(whole(tokens, seq), tokens))
    names = [{name for name, _ in model.named_parameters()} for model in (first, second, whole)]
    assert names[0] | names[1] == names[2]
    assert not names[0] & names[1]


def test_a_token_depends_on_those_before_it_and_on_none_after():
    model, (tokens, seq) = _model(), _tokens()
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % _CONFIG.vocab_size
    difference = (model(tokens, seq) - model(other, seq)).abs().amax(dim=(0, 2))
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 0).all()


def test_only_the_distance_of_positions_matters():
    model, (tokens, seq) = _model(), _tokens()
    moved = SeqInfo(seq.positions + 50)
    torch.testing.assert_close(model(tokens, moved), model(tokens, seq), rtol=1e-3, atol=1e-3)
    stretched = SeqInfo(seq.positions * 3)
    assert (model(tokens, stretched) - model(tokens, seq)).abs().max() > 0.01


def test_rope_rotates_pairs_half_a_head_apart():
    frequencies = rope_frequencies(8, 10_000.0, None, torch.device("cpu"))
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    positions = torch.tensor([[0, 1, 5]])
    x = torch.randn(1, 3, 2, 8)
    rotated = apply_rope(x, *rope_tables(positions, frequencies))
    angles = positions[0, :, None, None] * frequencies
    wanted = torch.complex(x[0, ..., :4], x[0, ..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated[0], torch.cat([wanted.real, wanted.imag], dim=-1))
    assert torch.equal(rotated[:, 0], x[:, 0])


def test_rope_scaling_stretches_long_wavelengths_only():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    plain = rope_frequencies(128, 500_000.0, None, torch.device("cpu"))
    scaled = rope_frequencies(128, 500_000.0, scaling, torch.device("cpu"))
    wavelengths = 2 * torch.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~(short | long)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


# --------------------------------------------------------------------------------------------------------- the folder


def test_models_import_torch_the_standard_library_and_themselves_only():
    allowed = {"torch", "models", *sys.stdlib_module_names}
    files = sorted(Path(models.__file__).parent.rglob("*.py"))
    assert {"__init__.py", "blocks.py", "llama3.py"} <= {file.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}, line {node.lineno}: relative import"
                names = [node.module]
            strangers = [name for name in names if name.partition(".")[0] not in allowed]
            assert not strangers, f"{file.name}, line {node.lineno}: imports {strangers}"
