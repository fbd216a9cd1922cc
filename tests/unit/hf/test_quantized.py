"""Quantized folders are dequantized on reading, with the values of the independent code in tests/quantized_files.py."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests import quantized_files
from tests.hf_folders import NORM, assert_logits_agree, change_json, read, tensors_of, their_model
from tests.quantized_files import FLOAT8, MXFP4, from_float8, from_mxfp4, to_float8, write_alone, write_float8
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.hf.export import export
from titanlite.hf.folder import stored_tensors
from titanlite.registry.family import load_family
from titanlite.tools.open_model import open_model, recognize


def random_box(generator: random.Random, shape: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [generator.randrange(size) for size in shape]
    return tuple(slice(start, generator.randint(start + 1, size)) for start, size in zip(starts, shape, strict=True))


def assert_slices_are_those_of(whole: torch.Tensor, folder, name: str) -> None:
    entries, problems = stored_tensors(folder)
    assert not problems and list(entries) == [name]
    entry, generator = entries[name], random.Random(0)
    assert (entry.shape, entry.dtype) == (tuple(whole.shape), torch.bfloat16)
    boxes = [tuple(slice(0, size) for size in whole.shape), *(random_box(generator, whole.shape) for _ in range(200))]
    for box in boxes:
        values = entry.read(box)
        assert values.dtype == torch.float32
        assert torch.equal(values, whole[box]), box


@pytest.mark.parametrize("shape", [(1, 1), (50, 100), (96, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_slice_of_float8_blocks_equals_that_of_the_full_tensor(tmp_path, shape, dtype):
    block = tuple(FLOAT8["weight_block_size"])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[1])
    quantized, scales = to_float8(weight, block)
    folder = write_alone(tmp_path, {"x.weight": quantized, "x.weight_scale_inv": scales.to(dtype)}, FLOAT8)
    whole = from_float8(quantized, scales.to(dtype), block)
    assert_slices_are_those_of(whole, folder, "x.weight")
    assert dtype == torch.bfloat16 or ((whole - weight).abs() <= weight.abs() / 16 + scales.max() * 2**-9).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 33, 2)], ids=str)
def test_any_slice_of_mxfp4_equals_that_of_the_full_tensor_and_of_transformers(tmp_path, shape):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(253, shape, dtype=torch.uint8, generator=generator)  # 2^126 x 6 is the largest that float32 holds
    folder = write_alone(tmp_path, {"x.gate_up_proj_blocks": blocks, "x.gate_up_proj_scales": scales}, MXFP4)
    whole = from_mxfp4(blocks, scales)
    assert torch.equal(whole, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    assert torch.equal(whole, whole.bfloat16().float()), "bfloat16 holds every value"
    assert_slices_are_those_of(whole, folder, "x.gate_up_proj")


# ------------------------------------------------------------------------------------------------------------- whole models

DEEPSEEK = "tests.tiny_deepseek_v3"


@pytest.fixture(scope="module")
def float8(sources, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A folder of DeepSeek-V3 in float8, and its values; must not be changed."""
    folder = tmp_path_factory.mktemp("quantized") / "float8"
    return folder, write_float8(folder, sources(DEEPSEEK, "plain"))


def test_a_float8_folder_gives_the_logits_of_transformers(sources, tmp_path):
    """In blocks of 8 x 8, since transformers' blocks must divide each matrix."""
    write_float8(tmp_path / "even", sources(DEEPSEEK, "plain"), (8, 8))
    how = FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "even", dtype=torch.float32, quantization_config=how).float()
    assert_logits_agree(read(tmp_path / "even", DEEPSEEK, "plain"), theirs, 512)


def test_import_and_export_give_bfloat16_values_and_a_float32_bias(pools, float8, tmp_path):
    folder, values = float8
    weights = tmp_path / "weights"
    pools[2].run("tests.hf_folders:import_here", source=folder, output=weights, model=DEEPSEEK)
    for dtype in (None, torch.bfloat16):
        export(weights, tmp_path / str(dtype), dtype, named=DEEPSEEK)
        found = tensors_of(tmp_path / str(dtype))
        assert found.keys() == values.keys()
        for name, tensor in found.items():
            assert tensor.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
            assert torch.equal(tensor, values[name].to(tensor.dtype)), name
        description = json.loads((tmp_path / str(dtype) / "config.json").read_text())
        assert "quantization_config" not in description and description["torch_dtype"] == "bfloat16"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype), dtype="auto")
        assert model.dtype == torch.bfloat16
        assert all(b.dtype == torch.float32 for name, b in model.named_buffers() if name.endswith("correction_bias"))


def test_a_folder_and_its_import_open_with_their_length_and_dtype_and_the_float32_biases_of_routers(
    pools, float8, tmp_path, group_of_one
):
    """In bfloat16 large biases become equal, and a router chooses other experts."""
    folder, values = float8
    pools[1].run("tests.hf_folders:import_here", source=folder, output=tmp_path / "weights", model=DEEPSEEK)
    length = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    assert length != Config().training.seq_len, "a default that stands in for it would not be seen"
    for source in (folder, tmp_path / "weights"):
        opened = open_model(source, torch.device("cpu"), name=DEEPSEEK)
        assert opened.seq_len == length and {p.dtype for p in opened.model.parameters()} == {torch.bfloat16}
        biases = [buffer for name, buffer in opened.model.named_buffers() if name.endswith("router.bias")]
        stored = [value for name, value in values.items() if name.endswith("correction_bias")]
        assert biases and all(torch.equal(ours, theirs) for ours, theirs in zip(biases, stored, strict=True))
        assert not all(torch.equal(bias, bias.bfloat16().float()) for bias in biases)


def test_mtp_layers_are_left_out_of_float8_folders(float8, tmp_path):
    folder = shutil.copytree(float8[0], tmp_path / "more")
    stored = tensors_of(folder)
    extra = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in stored.items() if ".layers.2.self_attn." in name}
    quantized_files.write(tmp_path / "new", folder, stored | extra, FLOAT8)
    assert any(name.endswith("_scale_inv") for name in extra)
    read(tmp_path / "new", DEEPSEEK, "plain")


# ---------------------------------------------------------------------------- gpt-oss: tensors are joined and transposed there

GPT_OSS, EXPERTS = "tests.tiny_gpt_oss", "layers.1.ffn.experts"


def in_mxfp4(source, folder) -> dict[str, Tensor]:
    """Writes a copy of a folder with random bytes as the experts' matrices -> the values of all of its tensors."""
    generator, stored, values = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in tensors_of(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values[name] = from_mxfp4(blocks, scales)
    quantized_files.write(folder, source, stored, MXFP4)
    return values


def test_mxfp4_weights_are_dequantized_and_give_transformers_logits(sources, tmp_path):
    values = in_mxfp4(sources(GPT_OSS, "plain"), tmp_path / "mxfp4")
    ours = read(tmp_path / "mxfp4", GPT_OSS, "plain")
    there = "model.layers.1.mlp.experts"
    both, down = values[f"{there}.gate_up_proj"], values[f"{there}.down_proj"]
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w1"), both[..., ::2].transpose(1, 2))
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w3"), both[..., 1::2].transpose(1, 2))
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w2"), down.transpose(1, 2))
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w3_bias"), values[f"{there}.gate_up_proj_bias"][:, 1::2].float())
    theirs = their_model(load_family(GPT_OSS, "plain"))
    theirs.load_state_dict({name: tensor.float() for name, tensor in values.items()})
    assert_logits_agree(ours, theirs, 512)


# -------------------------------------------------------------------------------------------------------------- what is wrong

_Q = "model.layers.1.self_attn.q_a_proj.weight"
_Q_SCALE = f"{_Q}_scale_inv"
Tensors = dict[str, Tensor]


FLOAT8_FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scale": (lambda t: t.pop(_Q_SCALE), rf"  {_Q_SCALE}: is missing, and {_Q} is float8$"),
    "no weight": (lambda t: t.pop(_Q), rf"{_Q_SCALE}: in model-.*, but {_Q} is not float8\n.*{_Q} .*: is missing$"),
    "scales of another shape": (lambda t: t.update({_Q_SCALE: t[_Q_SCALE].T.contiguous()}), rf"{_Q_SCALE}: \(3, 2\) in model-"),
    "a vector": (lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}), rf"{NORM}: \(64,\) in .*: only matrices"),
}


@pytest.mark.parametrize("fault", FLOAT8_FAULTS)
def test_wrong_parts_of_float8_weights_are_named_before_anything_is_read(float8, tmp_path, monkeypatch, fault):
    damage, message = FLOAT8_FAULTS[fault]
    tensors = tensors_of(float8[0])
    damage(tensors)
    quantized_files.write(tmp_path / "damaged", float8[0], tensors, FLOAT8)
    monkeypatch.setattr("titanlite.hf.load._slice", None)
    with pytest.raises(UserError, match=f"(?m){message}") as raised:
        read(tmp_path / "damaged", DEEPSEEK, "plain")
    assert len(str(raised.value).splitlines()) <= 3, raised.value


MXFP4_FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (lambda t: t.pop("x_scales"), "x_scales: is missing, and x_blocks is there$"),
    "no blocks": (lambda t: t.pop("x_blocks"), "x_scales: in model.safetensors, without x_blocks$"),
    "blocks of another size": (lambda t: t.update(x_blocks=t["x_blocks"][..., :8].clone()), r"x_blocks: .* must be torch"),
    "scales of another shape": (lambda t: t.update(x_scales=t["x_scales"][:, :4].clone()), r"x_scales: .* \(2, 5, 3\) for"),
    "twice": (lambda t: t.update(x=torch.zeros(2, 96, 5)), "x: in model.safetensors, and as x_blocks in model.safetensors$"),
}


@pytest.mark.parametrize("fault", MXFP4_FAULTS)
def test_wrong_parts_of_mxfp4_weights_are_named(tmp_path, fault):
    tensors = {"x_blocks": torch.zeros(2, 5, 3, 16).byte(), "x_scales": torch.full((2, 5, 3), 127).byte()}
    damage, message = MXFP4_FAULTS[fault]
    damage(tensors)
    _, problems = stored_tensors(write_alone(tmp_path, tensors, MXFP4))
    assert len(problems) == 1 and re.search(message, problems[0]), problems


def test_quantized_weights_without_quantization_config_are_refused(float8, tmp_path):
    folder = shutil.copytree(float8[0], tmp_path / "silent")
    change_json(folder / "config.json", quantization_config=None)
    with pytest.raises(UserError, match=rf"{_Q}: is stored in .* as F8_E4M3, .*, or what quantization_config of"):
        read(folder, DEEPSEEK, "plain")


def test_a_float8_folder_that_transformers_writes_is_read(float8, tmp_path):
    folder = shutil.copytree(float8[0], tmp_path / "theirs")
    table = FineGrainedFP8Config(weight_block_size=(16, 24), modules_to_not_convert=["lm_head"]).to_dict()
    change_json(folder / "config.json", quantization_config=table)
    assert recognize(folder, DEEPSEEK).flavor == "plain"
    read(folder, DEEPSEEK, "plain")
