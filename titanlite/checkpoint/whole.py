"""A checkpoint's tensors one at a time, whole, in a single process: for what converts checkpoints."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.manifest import Damaged
from titanlite.checkpoint.storage import Reader


class Stored:
    """A checkpoint whose files are what was written. Raises Damaged, and UserError for one of another version.

    part, parts: of its files only every `parts`-th is compared with its checksum, from number `part` on.
    """

    def __init__(self, source: Path, part: int = 0, parts: int = 1):
        self.source, self.manifest = source, manifest.read(source)
        if damage := "\n".join(load.faults(source, self.manifest, part, parts)):
            raise Damaged(damage)
        self._reader = Reader(source, self.manifest.files)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def entries(self) -> dict[str, TensorStorageMetadata]:
        """name -> shape and dtype, of all tensors."""
        return self._metadata.state_dict_metadata

    def read(self, name: str) -> Tensor:
        """A whole tensor, as it is stored."""
        entry = self.entries()[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner)
        return tensor
