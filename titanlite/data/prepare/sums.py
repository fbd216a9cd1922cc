"""Writes a file with a checksum for each block; `titanlite/data/blocks.py` reads it."""

from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.data.blocks import BLOCK, sums_of


class BlockWriter:
    """A file that is written sequentially. `close` writes its checksums; an incomplete file has none."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO = open(path, "wb")
        self._size, self._block, self._sums, self._digest = 0, xxhash.xxh3_64(), array("Q"), xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        """The next bytes: anything that has a buffer."""
        self._file.write(data)
        self._digest.update(data)
        rest = memoryview(data).cast("B")
        written = len(rest)
        while len(rest):
            part = rest[: BLOCK - self._size % BLOCK]
            self._block.update(part)
            self._size += len(part)
            rest = rest[len(part) :]
            if self._size % BLOCK == 0:
                self._end_block()
        return written

    def _end_block(self) -> None:
        self._sums.append(self._block.intdigest())
        self._block.reset()

    def close(self) -> str:
        """Completes the file, and writes its checksums; -> that of the whole file."""
        self._file.close()
        if self._size % BLOCK:
            self._end_block()
        sums = np.array([self._size, *self._sums], "<u8").tobytes()
        sums_of(self._path).write_bytes(sums + xxhash.xxh3_64_intdigest(sums).to_bytes(8, "little"))
        return self._digest.hexdigest()
