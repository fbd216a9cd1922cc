"""Loads safetensors into a model on any mesh: each rank reads only its own slices."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titanlite.ground.errors import UserError
from titanlite.hf.entries import Box, Entry
from titanlite.transforms.shards import global_offset, local_part

_CHUNK = 2**25  # bytes per read, or one row: mapped pages count as memory of the process until the file is closed


@torch.no_grad()
def load_weights(tensors: Mapping[str, Tensor], weights: Mapping[str, Sequence[Entry]]) -> None:
    """Reads the entries of `find_weights` into tensors of the same names, in place and in their dtypes.

    Raises UserError for a tied parameter that is stored twice with different values, and for a quantized one that has values
    that are not finite.
    """
    for name, entries in weights.items():
        if (local := local_part(tensors[name])).numel():
            _read_box(local, entries, global_offset(tensors[name]))


def _read_box(local: Tensor, entries: Sequence[Entry], corner: Sequence[int]) -> None:
    """Fills `local` with the slice of the entries that begins at `corner`, a few rows at a time; the entries must be equal."""
    a_row = math.prod(local.shape[1:]) * entries[0].dtype.itemsize
    rows = max(1, _CHUNK // a_row)
    for start in range(0, local.shape[0], rows):
        part = local[start : start + rows]
        box = tuple(slice(c, c + n) for c, n in zip((corner[0] + start, *corner[1:]), part.shape, strict=True))
        values = _slice(entries[0], box)
        for other in entries[1:]:
            if not torch.equal(values, _slice(other, box).to(values.dtype)):
                raise UserError(f"{other.file}: {other.name} differs from {entries[0].name}, and the model ties them")
        part.copy_(values)


def _slice(entry: Entry, box: Box) -> Tensor:
    return entry.read(box)
