"""Files with a checksum for each block: computed when a file is written, compared by each process that first reads a block.

NAME.sums beside a file, little-endian uint64: the bytes of the file, the checksum of each block, the checksum of all of these.

A block has 1 MiB. A process reads whole blocks until it has read all of them once, so larger blocks would multiply what the
first samples of a run take from the disk; this size adds 8 bytes to a million. XXH3 (https://xxhash.com) hashes 30 GB/s a core,
CRC-32 2.4, BLAKE2b 0.9 (an AMD EPYC): a block takes 17 us. It detects damage, not manipulation.
"""

import mmap
import os
import resource
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import open_file, read_bytes

_SHIFT = 20
BLOCK = 2**_SHIFT
_REMEDY = "in the cache, remove its folder, which the next start makes again; elsewhere, copy the file or tokenize again"


def sums_of(path: Path) -> Path:
    """NAME.sums."""
    return path.with_name(f"{path.name}.sums")


class BlockFile:
    """A file that is mapped at its first read. Pickled, it is only a name: each process maps, and verifies, what it reads.

    has_sums: whether NAME.sums exists. unverified: how many blocks this process has not verified yet; 0 without checksums.
    """

    def __init__(self, path: Path, size: int, has_sums: bool | None = None):
        self.path, self.size = path, size
        self.has_sums = os.path.lexists(sums_of(path)) if has_sums is None else has_sums
        self.unverified = -(-size // BLOCK) if self.has_sums else 0
        self.verified: set[int] = set()  # blocks
        self._mapping: mmap.mmap | None = None

    def __reduce__(self) -> Any:
        return BlockFile, (self.path, self.size, self.has_sums)

    def require_sums(self) -> None:
        """Raises UserError where a file that was written with checksums has none."""
        if not self.has_sums:
            raise UserError(f"{sums_of(self.path)}: is missing; {_REMEDY}")

    def verify(self, begin: int, end: int) -> None:
        """Reads the blocks of bytes `begin` .. `end` that this process has not read yet. Raises UserError if one is damaged.

        A file without checksums passes.
        """
        for number in range(begin >> _SHIFT, (end - 1 >> _SHIFT) + 1):
            if self.has_sums and number not in self.verified:
                self._verify(number)
                self.verified.add(number)
                self.unverified -= 1

    def _verify(self, number: int) -> None:
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.size)
        with open_file(self.path) as file:  # read, not mapped: a mapped page counts as memory
            content = os.pread(file.fileno(), end - begin, begin)
        if xxhash.xxh3_64_intdigest(content) != self._sums[number]:
            where = f"block {number}, bytes {begin:,} to {end:,}"
            raise UserError(f"{self.path}: is damaged: {where}: its checksum is not the one that was written; {_REMEDY}")

    @cached_property
    def _sums(self) -> np.ndarray:
        """(blocks,) uint64."""
        path, blocks = sums_of(self.path), -(-self.size // BLOCK)
        content = read_bytes(path, 8 * (blocks + 2))
        if len(content) < 16 or xxhash.xxh3_64_intdigest(content[:-8]).to_bytes(8, "little") != content[-8:]:
            raise UserError(f"{path}: is damaged: its last number is not the checksum of the others; {_REMEDY}")
        size, *_ = numbers = np.frombuffer(content, "<u8")
        if size != self.size or len(numbers) != blocks + 2:
            raise UserError(f"{self.path}: has {self.size:,} bytes, and {size:,} were written, as {path.name} says; {_REMEDY}")
        return numbers[1:-1]

    @cached_property
    def mapped(self) -> np.ndarray:
        """(size,) uint8, not verified."""
        if not self.size:
            return np.zeros(0, np.uint8)  # an empty mapping does not exist
        # A mapping keeps a file descriptor, and a trillion tokens are a thousand shards of two files: leave the rest as many
        # as they had.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft not in (hard, resource.RLIM_INFINITY):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, hard))
        with open_file(self.path) as file:
            try:
                self._mapping = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
            except ValueError:
                raise UserError(self._truncated(os.fstat(file.fileno()).st_size)) from None
        return np.frombuffer(self._mapping, np.uint8)

    def check_size(self) -> None:
        """Raises UserError for a mapped file that was truncated: the kernel ends a process that reads behind its end (SIGBUS).

        A system call, which takes a microsecond.
        """
        if self._mapping is not None and (size := self._mapping.size()) < self.size:
            raise UserError(self._truncated(size))

    def _truncated(self, size: int) -> str:
        return f"{self.path}: truncated since it was opened: it has {size:,} of {self.size:,} bytes; {_REMEDY}"


class Array:
    """`count` numbers of a file, from byte `first` on. Reading a slice verifies its blocks."""

    def __init__(self, file: BlockFile, dtype: np.dtype, first: int, count: int):
        self._file, self.dtype, self._first, self._count, self._itemsize = file, dtype, first, count, dtype.itemsize

    def __reduce__(self) -> Any:
        return Array, (self._file, self.dtype, self._first, self._count)

    @cached_property
    def numbers(self) -> np.ndarray:
        """(count,), not verified."""
        return self._file.mapped[self._first : self._first + self._count * self._itemsize].view(self.dtype)

    def checked(self) -> "np.ndarray | Array":
        """To read slices: the bare numbers once nothing is left to verify, else this array, which verifies. Call it for each
        row: a call for each piece made packed rows a tenth slower.
        """
        return self if self._file.unverified else self.numbers

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        """The numbers of a slice without a step. Raises UserError where a block is damaged."""
        begin, end, _ = part.indices(self._count)
        if self._file.unverified:
            self._file.verify(self._first + begin * self._itemsize, self._first + end * self._itemsize)
        return self.numbers[begin:end]
