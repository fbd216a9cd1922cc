"""Writes the checksums of a file's blocks; `titanlite/data/blocks.py` compares them."""

from array import array
from pathlib import Path

import numpy as np
import xxhash

from titanlite.data.blocks import BLOCK, sums_of


def write_sums(path: Path) -> str:
    """Writes the checksums of a complete file; -> that of the whole file.

    The file is read again, mostly from the page cache: a gigabyte in less than a second. An incomplete file has no checksums.
    """
    whole, sums = xxhash.xxh3_128(), array("Q", [0])
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
            sums.append(xxhash.xxh3_64_intdigest(block))
            sums[0] += len(block)
    content = np.array(sums, "<u8").tobytes()
    sums_of(path).write_bytes(content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little"))
    return whole.hexdigest()
