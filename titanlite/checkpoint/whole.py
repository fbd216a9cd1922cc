"""Reads a checkpoint one whole tensor at a time in a single process, for conversions."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from titanlite.checkpoint.load import intact
from titanlite.checkpoint.storage import Reader, tensor_entries
from titanlite.checkpoint.tensors import AVERAGE_UPDATES, average_of
from titanlite.ground.errors import UserError


class Stored:
    """An intact checkpoint; `entries`: name -> shape and dtype of every tensor. Raises as `intact` does.

    part, parts: verifies only every `parts`-th file, from number `part` on. average: `read` returns a weight's EMA where there
    is one; a UserError where the checkpoint has none.
    """

    def __init__(self, source: Path, part: int = 0, parts: int = 1, average: bool = False):
        self.source, self._average = source, average
        self.manifest, self._metadata = intact(source, part, parts)
        self.entries = tensor_entries(self._metadata)
        self._reader = Reader(source, self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        if average and AVERAGE_UPDATES not in self.entries:
            raise no_average(source)

    def read(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype."""
        if self._average and average_of(name) in self.entries:
            name = average_of(name)
        entry = self.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner)
        return tensor


def no_average(source: Path) -> UserError:
    """For `--weights ema` with what has no EMA."""
    return UserError(f"--weights ema: {source} has no EMA; runs with optimizer.ema_decay > 0 write one")
