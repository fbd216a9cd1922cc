"""Tensors of safetensors files, as a model sees them: quantized ones are dequantized while they are read, slice by slice."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from titanlite.ground.errors import UserError
from titanlite.hf.part import TensorPart

Box = tuple[slice, ...]  # of a tensor: a start and a stop for each dimension

_GROUP = 32  # values of MXFP4 that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by its lower three bits; the fourth is the sign
_E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=-1)  # (byte, value): the low half is the first


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file. shape, dtype: those of its values, after dequantization."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        """A slice. Quantized tensors give float32, and raise UserError for values that are not finite."""
        with safe_open(str(self.file), "pt") as file:
            return file.get_slice(self.name)[box]


@dataclass(frozen=True)
class Float8Blocks(Entry):
    """A matrix of float8_e4m3fn with a factor for each block of it (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""

    scales: Entry  # (blocks of rows, blocks of columns)
    block: tuple[int, int]

    def read(self, box: Box) -> Tensor:
        values = super().read(box).float()
        rows, columns = (torch.arange(part.start, part.stop) // size for part, size in zip(box, self.block, strict=True))
        scales = self.scales.read(tuple(slice(int(part[0]), int(part[-1]) + 1) for part in (rows, columns))).float()
        values *= scales.index_select(1, columns - columns[0]).index_select(0, rows - rows[0])
        return _checked(values, scales, self.scales)


@dataclass(frozen=True)
class Mxfp4(Entry):
    """Matrices in MXFP4 (OCP Microscaling Formats v1.0, section 5): each group of 32 inputs has a power of two as factor.

    Stored as (experts, outputs, groups, 16 bytes of two values); as transformers has gpt-oss without quantization, the shape
    here is (experts, inputs, outputs).
    """

    blocks: Entry
    scales: Entry  # (experts, outputs, groups); a byte s stands for 2^(s - 127)

    def read(self, box: Box) -> Tensor:
        experts, inputs, outputs = box
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        blocks = self.blocks.read((experts, outputs, groups, slice(0, _GROUP // 2)))
        scales = self.scales.read((experts, outputs, groups)).view(torch.float8_e8m0fnu).float()
        values = _PAIRS.index_select(0, blocks.int().flatten()).view(*scales.shape, _GROUP)  # 3.6 times as fast as an index
        values = _checked(values.mul_(scales[..., None]), scales, self.scales).flatten(-2)
        first = groups.start * _GROUP
        return values[..., inputs.start - first : inputs.stop - first].transpose(1, 2)


def _checked(values: Tensor, scales: Tensor, entry: Entry) -> Tensor:
    if not (scales > 0).all():  # NaN is not
        raise UserError(f"{entry.file}: {entry.name}: has scales that are not above 0")
    if not torch.stack(values.aminmax()).isfinite().all():  # NaN is both
        raise UserError(f"{entry.file}: {entry.name}: weights times these scales are not finite")
    return values


@dataclass(frozen=True)
class PartOf(Entry):
    """The part of a tensor that is a parameter of ours. A slice is one of the parameter; all else is of the whole."""

    whole: Entry
    part: TensorPart

    def read(self, box: Box) -> Tensor:
        return self.part.view(self.whole.read(self.part.box(box)))


def part_of(entry: Entry, part: TensorPart) -> Entry:
    """The part of a tensor that is a parameter of ours, which may be all of it."""
    return entry if part == TensorPart(entry.name) else PartOf(entry.file, entry.name, entry.shape, entry.dtype, entry, part)


@dataclass(frozen=True)
class Stack(Entry):
    """Tensors of equal shape, one for each expert, that are one parameter of ours; file and name are those of the first."""

    parts: tuple[Entry, ...]

    def read(self, box: Box) -> Tensor:
        experts, *of_each = box
        return torch.stack([part.read(tuple(of_each)) for part in self.parts[experts]])


def stack_of(parts: Sequence[Entry]) -> Entry:
    """Tensors of equal shape as one parameter of ours, in the dtype that holds the values of all."""
    first, dtype = parts[0], functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return Stack(first.file, first.name, (len(parts), *first.shape), dtype, tuple(parts))


# ------------------------------------------------------------------------------------------------- the parts of a quantized one


def dequantize(entries: dict[str, Entry], quantization: Mapping[str, Any]) -> list[str]:
    """Replaces the parts of each quantized tensor by one entry of its values, in place; returns what is wrong with them.

    quantization: the table of config.json, as validated.
    """
    if quantization["quant_method"] == "mxfp4":
        return list(_join_mxfp4(entries))
    rows, columns = quantization["weight_block_size"]
    return list(_join_float8(entries, (rows, columns)))


def _join_float8(entries: dict[str, Entry], block: tuple[int, int]) -> Iterator[str]:
    for name in [name for name, entry in entries.items() if entry.dtype == torch.float8_e4m3fn]:
        entry, theirs = entries[name], f"{name}_scale_inv"
        scales = entries.pop(theirs, None)
        entries[name] = Entry(entry.file, name, entry.shape, torch.bfloat16)  # if it cannot be read, it is not missing too
        if len(entry.shape) != 2:
            yield f"{name}: {entry.shape} in {entry.file.name}: only matrices are read as float8"
        elif scales is None:
            yield f"{theirs}: is missing, and {name} is float8"
        elif scales.dtype not in (torch.float32, torch.bfloat16):
            yield f"{theirs}: is {scales.dtype} in {scales.file.name}: must be torch.float32 or torch.bfloat16"
        elif scales.shape != (blocks := tuple(-(-size // side) for size, side in zip(entry.shape, block, strict=True))):
            yield f"{theirs}: {scales.shape} in {scales.file.name}, {blocks} for {entry.shape} in blocks of {block}"
        else:
            entries[name] = Float8Blocks(entry.file, name, entry.shape, torch.bfloat16, scales, block)
    for name in [name for name in entries if name.endswith("_scale_inv")]:
        yield f"{name}: in {entries.pop(name).file.name}, but {name.removesuffix('_scale_inv')} is not float8"


def _join_mxfp4(entries: dict[str, Entry]) -> Iterator[str]:
    for theirs in [name for name in entries if name.endswith("_blocks")]:
        name = theirs.removesuffix("_blocks")
        blocks, scales = entries.pop(theirs), entries.pop(f"{name}_scales", None)
        if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
            where = f"{blocks.dtype} {blocks.shape} in {blocks.file.name}"
            yield f"{theirs}: {where}: must be torch.uint8 (experts, outputs, groups, {_GROUP // 2})"
            continue
        if name in entries:
            yield f"{name}: in {entries[name].file.name}, and as {theirs} in {blocks.file.name}"
        experts, outputs, groups, _ = blocks.shape
        shape = experts, groups * _GROUP, outputs
        entries[name] = Entry(blocks.file, name, shape, torch.bfloat16)  # if it cannot be read, it is not missing too
        if scales is None:
            yield f"{name}_scales: is missing, and {theirs} is there"
        elif (scales.dtype, scales.shape) != (torch.uint8, blocks.shape[:-1]):
            where = f"{scales.dtype} {scales.shape} in {scales.file.name}"
            yield f"{name}_scales: {where}, torch.uint8 {blocks.shape[:-1]} for {theirs}"
        else:
            entries[name] = Mxfp4(blocks.file, name, shape, torch.bfloat16, blocks, scales)
    for name in [name for name, entry in entries.items() if name.endswith("_scales") and entry.dtype == torch.uint8]:
        yield f"{name}: in {entries.pop(name).file.name}, without {name.removesuffix('_scales')}_blocks"
