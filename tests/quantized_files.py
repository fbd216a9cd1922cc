"""Writes folders of quantized weights, and dequantizes them independently, from the published formulas."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.hf_folders import change_json, tensors_of
from titanlite.hf.folder import INDEX, SINGLE

FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_PLAIN = (
    "norm.weight",
    "layernorm.weight",
    "embed_tokens.weight",
    "lm_head.weight",
    "mlp.gate.weight",
    "score_correction_bias",
)


def to_float8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(float8, scales): each block is divided by a scale that makes its largest magnitude 448."""
    rows, columns = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    quantized, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            here = _block(row, column, block)
            scales[row, column] = weight[here].abs().max().float() / 448
            quantized[here] = (weight[here].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return quantized, scales


def from_float8(quantized: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The float32 values: each block times its scale."""
    values = torch.full(quantized.shape, float("nan"))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            here = _block(row, column, block)
            values[here] = quantized[here].float() * scales[row, column].float()
    return values


def _block(row: int, column: int, block: tuple[int, int]) -> tuple[slice, slice]:
    return slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The float32 values (experts, inputs, outputs), each from sign, exponent and mantissa (OCP Microscaling v1.0, 5.3.3)."""
    codes = torch.stack([blocks % 16, blocks // 16], dim=-1).flatten(-2).double()  # the low half of a byte is the first value
    sign, exponent, mantissa = (codes // 8), (codes % 8) // 2, codes % 2
    magnitude = torch.where(exponent == 0, mantissa / 2, 2.0 ** (exponent - 1) * (1 + mantissa / 2))
    values = (1 - 2 * sign) * magnitude * 2.0 ** (scales.double() - 127)[..., None]
    return values.flatten(-2).transpose(1, 2).float()


def write_float8(folder: Path, source: Path, block: tuple[int, int] = (16, 24)) -> dict[str, Tensor]:
    """A copy of a folder with its matrices in float8, as in DeepSeek-V3; -> the bfloat16 and float32 values of all tensors.

    Router biases, which the original may have as zeros, get values that bfloat16 cannot represent.
    """
    stored, values = {}, {}
    for name, tensor in tensors_of(source).items():
        stored[name] = values[name] = tensor.bfloat16()
        if name.endswith("correction_bias"):
            stored[name] = values[name] = torch.linspace(-0.1, 0.1, len(tensor))
        if not name.endswith(_PLAIN):
            stored[name], stored[f"{name}_scale_inv"] = to_float8(tensor, block)
            values[name] = from_float8(stored[name], stored[f"{name}_scale_inv"], block)
    write(folder, source, stored, FLOAT8 | {"weight_block_size": block})
    return values


def write(folder: Path, source: Path, tensors: dict[str, Tensor], quantization: dict) -> None:
    """Two files, with weights and scales in different ones where possible; config.json and tokenizer of another folder."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    change_json(folder / "config.json", quantization_config=quantization, torch_dtype="bfloat16")
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    places = {tensor: names[tensor.endswith(("_scale_inv", "_scales"))] for tensor in tensors}
    for name in names:
        save_file({key: value for key, value in tensors.items() if places[key] == name}, folder / name, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def write_alone(folder: Path, tensors: dict[str, Tensor], quantization: dict) -> Path:
    """A folder of some tensors that do not form a model."""
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": quantization}))
    return folder
