"""Joins the token files of finished units, in order, into shards of limited size, with checksums."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.data.indexed import TokenFile, path_of, write_index

_TOKENS_AT_ONCE = 2**22


def write_shards(
    units: Iterable[Path], folder: Path, dtype: np.dtype, limit: int, losses: bool, advance: Callable[[int], object]
) -> tuple[list[dict[str, Any]], int]:
    """-> (the manifest's entry of each shard, the largest id or -1).

    units: folders with tokens.bin and tokens.idx. limit: tokens per shard; a longer document is a shard of its own. losses:
    write a .loss beside every shard, since some documents are chats. advance: called with the number of tokens written.
    """
    shards: list[_Shard] = []
    largest = -1
    for unit in units:
        source = TokenFile(unit / "tokens")
        ends = np.cumsum(source.lengths, dtype=np.int64)  # (documents,) the end of each in source.ids
        first = 0
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            room = limit - shards[-1].tokens if shards else -1
            last = int(np.searchsorted(ends, begin + room, "right")) if room >= 0 else first
            if last == first:  # the next document does not fit
                if shards:
                    shards[-1].close()
                shards.append(_Shard(folder / f"{len(shards):05d}", dtype, losses))
                last = max(first + 1, int(np.searchsorted(ends, begin + limit, "right")))
            shards[-1].add(source, source.lengths[first:last], begin, int(ends[last - 1]), advance)
            largest = max(largest, shards[-1].largest)
            first = last
    if shards:
        shards[-1].close()
    return [shard.entry for shard in shards], largest


class _Shard:
    """A shard that is being written."""

    def __init__(self, prefix: Path, dtype: np.dtype, losses: bool):
        self.prefix, self.dtype = prefix, dtype
        self.tokens, self.largest = 0, -1
        self._lengths: list[np.ndarray] = []
        self._bin = _HashedFile(path_of(prefix, "bin"))
        self._loss = _HashedFile(path_of(prefix, "loss")) if losses else None

    def add(self, source: TokenFile, lengths: np.ndarray, begin: int, end: int, advance: Callable[[int], object]) -> None:
        """Appends the documents in source.ids[begin:end]."""
        for start in range(begin, end, _TOKENS_AT_ONCE):
            stop = min(start + _TOKENS_AT_ONCE, end)
            ids = source.ids[start:stop]
            self._bin.write(ids)
            self.largest = max(self.largest, int(ids.max()))
            if self._loss is not None:
                self._loss.write(np.ones(stop - start, np.uint8) if source.loss is None else source.loss[start:stop])
            advance(stop - start)
        self._lengths.append(np.array(lengths, "<i4"))
        self.tokens += end - begin

    def close(self) -> None:
        lengths = np.concatenate(self._lengths)
        write_index(self.prefix, self.dtype, lengths)
        self.entry = {
            "name": self.prefix.name,
            "documents": len(lengths),
            "tokens": self.tokens,
            "bin": self._bin.close(),
            "lengths": xxhash.xxh3_128_hexdigest(lengths.tobytes()),
            "loss": self._loss.close() if self._loss is not None else None,
        }


class _HashedFile:
    """A file that computes its checksum while it is written."""

    def __init__(self, path: Path):
        self._file: io.BufferedWriter = open(path, "wb")
        self._digest = xxhash.xxh3_128()

    def write(self, values: np.ndarray) -> None:
        self._file.write(values.data)
        self._digest.update(values.data)

    def close(self) -> str:
        self._file.close()
        return self._digest.hexdigest()
