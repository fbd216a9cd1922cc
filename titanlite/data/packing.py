"""The rows of best-fit packing, which `titanlite/data/prepare/packing.py` writes: which pieces of documents each one has."""

from pathlib import Path

import numpy as np

from titanlite.data.blocks import Array, BlockFile
from titanlite.ground.untrusted import size_of

_HEADER = 3  # numbers before the tables


class Packing:
    """The rows of one token file: the pieces of documents in each, in order."""

    def __init__(self, path: Path):
        """path: what `pack_file` wrote. Raises ValueError, EOFError or UserError for anything else."""
        self.stored = BlockFile(path, size_of(path))
        self.stored.require_sums()
        self.stored.verify(0, 1)
        mapped = np.load(path, mmap_mode="r")
        self._table = table = Array(self.stored, mapped.dtype, mapped.offset, mapped.size)
        self.rows, self._pieces, self.kept = (int(number) for number in table[:_HEADER])

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(first token in the file, tokens) of each piece of a row."""
        table = self._table.checked()
        begin, end = table[_HEADER + row : _HEADER + row + 2].tolist()
        start = _HEADER + self.rows + 1 + begin
        starts, lengths = (table[at : at + end - begin].tolist() for at in (start, start + self._pieces))
        return list(zip(starts, lengths, strict=True))
