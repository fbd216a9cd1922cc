"""Files with a checksum for each block: computed when a file is written, compared by each process that first reads a block.

NAME.sums beside a file, little-endian uint64: the bytes of the file, the checksum of each block, the checksum of all of these.

A block has 1 MiB. A process reads whole blocks until it has read all of them once, so larger blocks would multiply what the
first samples of a run take from the disk; this size adds 8 bytes to a million. XXH3 (https://xxhash.com) hashes 30 GB/s a core,
CRC-32 2.4, BLAKE2b 0.9 (an AMD EPYC): a block takes 17 us. It detects damage, not manipulation.
"""

import json
import os
import resource
from array import array
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.errors import UserError
from titanlite.outside import open_file, read_bytes

_SHIFT = 20
BLOCK = 2**_SHIFT
SEAL = "xxh3_128"  # the entry of a manifest that has the checksum of all others
_REMEDY = "copy the file again, or tokenize the text again"


def sums_of(path: Path) -> Path:
    """NAME.sums."""
    return path.with_name(f"{path.name}.sums")


def seal(values: dict[str, Any]) -> str:
    """The checksum of a manifest, but for the entry that has it."""
    text = json.dumps({name: value for name, value in values.items() if name != SEAL}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """A manifest with its checksum, and with the size of a block: each of the files that it lists has checksums."""
    values = {**values, "block_bytes": BLOCK}
    return {**values, SEAL: seal(values)}


def check_seal(manifest: dict[str, Any]) -> None:
    """Raises ValueError where a manifest is not as it was written. Manifests of titanlite 0.1 have no checksum."""
    if SEAL in manifest and manifest[SEAL] != seal(manifest):
        raise ValueError(f"it is damaged: its checksum is not {manifest[SEAL]}")
    if manifest.get("block_bytes", BLOCK) != BLOCK:
        raise ValueError(f"block_bytes = {manifest['block_bytes']}: must be {BLOCK}")


def check_sums(manifest: dict[str, Any], files: "list[BlockFile]") -> None:
    """Raises UserError where a file that was written with checksums has none."""
    for file in files if "block_bytes" in manifest else []:
        if not file.has_sums:
            raise UserError(f"{sums_of(file.path)}: is missing; {_REMEDY}")


class BlockWriter:
    """A file that is written sequentially, with its checksums."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO = open(path, "wb")
        self._size, self._block, self._sums = 0, xxhash.xxh3_64(), array("Q")

    def write(self, data: Any) -> int:
        """The next bytes: anything that has a buffer."""
        self._file.write(data)
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

    def close(self) -> None:
        """Completes the file, and writes its checksums."""
        self._file.close()
        if self._size % BLOCK:
            self._end_block()
        sums = np.array([self._size, *self._sums], "<u8").tobytes()
        sums_of(self._path).write_bytes(sums + xxhash.xxh3_64_intdigest(sums).to_bytes(8, "little"))

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


class BlockFile:
    """A file that is mapped at its first read. Pickled, it is only a name: each process maps, and verifies, what it reads.

    has_sums: whether NAME.sums exists. unverified: how many blocks this process has not verified yet; 0 without checksums.
    """

    def __init__(self, path: Path, size: int):
        self.path, self.size, self.has_sums = path, size, os.path.lexists(sums_of(path))
        self._forget()

    def _forget(self) -> None:
        self.verified: set[int] = set()  # blocks
        self.unverified = -(-self.size // BLOCK) if self.has_sums else 0

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "has_sums": self.has_sums}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def verify(self, begin: int, end: int) -> None:
        """Reads the blocks of bytes `begin` .. `end` that this process has not read yet. Raises UserError if one is damaged."""
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            if number not in self.verified:
                self._verify(number)
                self.verified.add(number)
                self.unverified -= 1

    def _verify(self, number: int) -> None:
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.size)
        try:
            with open_file(self.path) as file:  # read, not mapped: a mapped page counts as memory
                content = os.pread(file.fileno(), end - begin, begin)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: block {number}: {error.strerror}") from None
        if xxhash.xxh3_64_intdigest(content) != self._sums[number]:
            place = f"block {number}, bytes {begin:,} to {end:,}"
            raise UserError(f"{self.path}: is damaged: {place}: its checksum is not the one that was written; {_REMEDY}")

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
        try:
            return np.memmap(self.path, np.uint8, "r", 0, (self.size,)).view(np.ndarray)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise UserError(f"{self.path}: truncated since it was opened: it must hold {self.size:,} bytes") from None


class Array:
    """`count` numbers of a file, from byte `first` on. Reading a slice verifies its blocks."""

    def __init__(self, file: BlockFile, dtype: np.dtype, first: int, count: int):
        self._file, self.dtype, self._first, self._count = file, dtype, first, count
        self._itemsize = dtype.itemsize

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "numbers"}

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
        """As `read`."""
        begin, end, _ = part.indices(self._count)
        return self.read(begin, end)

    def read(self, begin: int, end: int) -> np.ndarray:
        """The numbers `begin` .. `end`, 0 <= begin <= end. Raises UserError where a block is damaged."""
        if self._file.unverified:
            first, last = self._first + begin * self._itemsize, self._first + end * self._itemsize
            if not self._file.verified.issuperset(range(first >> _SHIFT, (last - 1 >> _SHIFT) + 1)):  # faster than a loop
                self._file.verify(first, last)
        return self.numbers[begin:end]
