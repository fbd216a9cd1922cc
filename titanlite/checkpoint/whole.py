"""Reads a checkpoint one whole tensor at a time in a single process, for conversions."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from titanlite.checkpoint.load import intact
from titanlite.checkpoint.storage import Reader, tensor_entries


class Stored:
    """An intact checkpoint; `entries`: name -> shape and dtype of every tensor. Raises as `intact` does.

    part, parts: verifies only every `parts`-th file, from number `part` on.
    """

    def __init__(self, source: Path, part: int = 0, parts: int = 1):
        self.source = source
        self.manifest, self._metadata = intact(source, part, parts)
        self.entries = tensor_entries(self._metadata)
        self._reader = Reader(source, self.manifest.files)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype."""
        entry = self.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner)
        return tensor
