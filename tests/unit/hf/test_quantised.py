"""Quantised folders are read as their values: equal to a dequantisation that is written out in tests/quantised_files.py."""

import random

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.quantised_files import FLOAT8, MXFP4, from_float8, from_mxfp4, to_float8, write_alone
from titanlite.hf.folder import stored_tensors


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


@pytest.mark.parametrize("shape", [(1, 1), (16, 24), (17, 23), (50, 100), (96, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_slice_of_float8_blocks_is_that_of_the_whole(tmp_path, shape, dtype):
    block = tuple(FLOAT8["weight_block_size"])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[1])
    quantised, scales = to_float8(weight, block)
    folder = write_alone(tmp_path, {"x.weight": quantised, "x.weight_scale_inv": scales.to(dtype)}, FLOAT8)
    whole = from_float8(quantised, scales.to(dtype), block)
    assert_slices_are_those_of(whole, folder, "x.weight")
    assert dtype == torch.bfloat16 or ((whole - weight).abs() <= weight.abs() / 16 + scales.max() * 2**-9).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 3), (4, 33, 2), (2, 64, 5)], ids=str)
def test_any_slice_of_mxfp4_is_that_of_the_whole_and_of_transformers(tmp_path, shape):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(253, shape, dtype=torch.uint8, generator=generator)  # 2^126 x 6 is the largest that float32 holds
    folder = write_alone(tmp_path, {"x.gate_up_proj_blocks": blocks, "x.gate_up_proj_scales": scales}, MXFP4)
    whole = from_mxfp4(blocks, scales)
    assert torch.equal(whole, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    assert torch.equal(whole, whole.bfloat16().float()), "bfloat16 holds every value"
    assert_slices_are_those_of(whole, folder, "x.gate_up_proj")
