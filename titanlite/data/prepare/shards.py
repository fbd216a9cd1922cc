"""Writes token files with checksums: those of a unit, document by document, and the shards, which join finished units."""

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.data.indexed import DTYPES, HEADER, MAGIC, VERSION, TokenFile, path_of
from titanlite.data.prepare.sums import write_sums

_TOKENS_AT_ONCE = 2**22


def smallest_type(vocabulary: int) -> np.dtype:
    """The smallest of the format's types that holds the ids below `vocabulary`. The format has no uint32."""
    fits = (dtype for dtype in (np.uint8, np.uint16, np.int32, np.int64) if vocabulary - 1 <= np.iinfo(dtype).max)
    return np.dtype(next(fits))


def write_index(prefix: Path, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Writes NAME.idx for consecutive documents of `lengths` tokens, (documents,) int32."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    with open(path_of(prefix, "idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths * np.int64(dtype.itemsize)).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    write_sums(path_of(prefix, "idx"))


class TokenWriter:
    """Writes NAME.bin and, with `losses`, NAME.loss; `close` writes NAME.idx from `lengths`, to which the caller appends."""

    def __init__(self, prefix: Path, dtype: np.dtype, losses: bool = False):
        """prefix: the files' path without its suffix."""
        self.prefix, self.dtype, self.tokens, self.lengths = prefix, np.dtype(dtype), 0, array("i")
        suffixes = ("bin", "loss") if losses else ("bin",)
        self._files: dict[str, BinaryIO] = {suffix: open(path_of(prefix, suffix), "wb") for suffix in suffixes}

    def write(self, ids: np.ndarray, loss: np.ndarray | None = None) -> None:
        """The next tokens. ids (tokens,) integers; loss (tokens,) bool or uint8, by default all ones."""
        self._files["bin"].write(ids.astype(self.dtype, copy=False).data)
        if "loss" in self._files:
            loss = np.ones(len(ids), np.uint8) if loss is None else loss.astype(np.uint8, copy=False)
            self._files["loss"].write(loss.data)
        self.tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Closes the files, and writes the index and all checksums; -> the entry of a manifest."""
        for file in self._files.values():
            file.close()
        digests = {suffix: write_sums(path_of(self.prefix, suffix)) for suffix in self._files}
        lengths = np.array(self.lengths, "<i4")
        write_index(self.prefix, self.dtype, lengths)
        return {
            "name": self.prefix.name,
            "documents": len(lengths),
            "tokens": self.tokens,
            "bin": digests["bin"],
            "lengths": xxhash.xxh3_128_hexdigest(lengths.tobytes()),
            "loss": digests.get("loss"),
        }


def write_shards(
    units: Iterable[Path], folder: Path, dtype: np.dtype, limit: int, losses: bool, advance: Callable[[int], object]
) -> tuple[list[dict[str, Any]], int]:
    """-> (the manifest's entry of each shard, the largest id or -1).

    units: folders with tokens.bin and tokens.idx. limit: tokens per shard; a longer document is a shard of its own. losses:
    write a .loss beside every shard, since some documents are chats. advance: called with the number of tokens written.
    """
    entries: list[dict[str, Any]] = []
    shard: TokenWriter | None = None
    largest = -1
    for unit in units:
        source = TokenFile(unit / "tokens")
        ends = np.cumsum(source.lengths[:], dtype=np.int64)  # (documents,) the end of each in source.ids
        first = 0
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            room = limit - shard.tokens if shard else 0
            last = int(np.searchsorted(ends, begin + room, "right"))
            if shard is None or last <= first:  # the next document does not fit
                if shard:
                    entries.append(shard.close())
                shard = TokenWriter(folder / f"{len(entries):05d}", dtype, losses)
                last = max(first + 1, int(np.searchsorted(ends, begin + limit, "right")))
            for start in range(begin, int(ends[last - 1]), _TOKENS_AT_ONCE):
                stop = min(start + _TOKENS_AT_ONCE, int(ends[last - 1]))
                shard.write(source.ids[start:stop], None if source.loss is None else source.loss[start:stop])
                largest = max(largest, int(source.ids[start:stop].max()))
                advance(stop - start)
            shard.lengths.frombytes(source.lengths[first:last].tobytes())
            first = last
    return [*entries, *([shard.close()] if shard else [])], largest
