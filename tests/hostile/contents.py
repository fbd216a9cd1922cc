"""Damaged contents: flipped bits and truncated files in token folders and checkpoints, ids of another vocabulary, forged
parts.
"""

import contextlib
import functools
import io
import pickle
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.hostile.judge import Case
from tests.token_files import write_jsonl
from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import FileDigest, Manifest
from titanlite.checkpoint.storage import METADATA
from titanlite.checkpoint.whole import Stored
from titanlite.config.read import read_config
from titanlite.data.blocks import sums_of
from titanlite.data.mixture import open_data
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.sums import write_sums
from titanlite.data.tokenizer import load_tokenizer
from titanlite.registry.family import vocabulary_of

Change = Callable[[Path], None]
Make = Callable[[Path], Callable[[], object]]

_TEXTS = [f"document {number}: " + f"word{number} " * (3 + 5 * number % 17) for number in range(24)]
_SEQ_LEN, _VOCABULARY = 16, 512
_RUN = """[model]
name = "tests.tiny"
flavor = "plain"
hf_assets_path = "assets"
[training]
dataset_path = "tokens"
seq_len = 16
"""
_POLICIES = {
    "pack": (),
    "mask": ("--training.document_mask", "true"),
    "best_fit": ("--training.document_policy", "best_fit"),
    "truncate": ("--training.document_policy", "truncate"),
}
_TOKENS = r"tokens/(00000\.|manifest\.json)"
_FILES = ["00000.bin", "00000.bin.sums", "00000.idx", "00000.idx.sums"]


# ------------------------------------------------------------------------------------------------------------- the originals


@functools.cache
def _original() -> Path:
    """A folder with a valid configuration, tokenizer, token files and checkpoint."""
    folder = Path(tempfile.mkdtemp(prefix="titanlite-contents-"))
    (folder / "run.toml").write_text(_RUN)
    (folder / "assets").mkdir()
    train_tokenizer(_TEXTS).save(str(folder / "assets" / "tokenizer.json"))
    loaded = load_tokenizer(str(folder / "assets"))
    text = str(write_jsonl(folder / "text.jsonl", _TEXTS))
    options = {"append_eos": True, "workers": 1, "shard_tokens": 10**9, "on_error": "fail"}
    with contextlib.redirect_stderr(io.StringIO()):
        prepare([text], folder / "tokens", loaded, **options)  # type: ignore[arg-type]
    (folder / "pair").mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(folder / "tokens" / f"00000.{suffix}", folder / "pair")
    _write_checkpoint(folder / "step-00000010")
    return folder


def _read_all(folder: Path, source: str, policy: str) -> bytes:
    """Every sample of the training data, as a run reads it."""
    paths = ["--model.hf_assets_path", str(folder / "assets"), "--training.dataset_path", str(folder / source)]
    with mock.patch.dict("os.environ", {"TITANLITE_CACHE": str(_original() / "cache")}):
        config = read_config(folder / "run.toml", [*paths, *_POLICIES[policy]])
        data = open_data(config, vocabulary_of(config.model))
        rows = np.arange(data.sources[0].samples)
        return b"".join(array.tobytes() for array in data.read(np.zeros_like(rows), rows) if array is not None)


@functools.cache
def _expected(source: str, policy: str) -> bytes:
    return _read_all(_original(), source, policy)


def _reading(source: str, policy: str, change: Change) -> Make:
    """Reads a changed copy of token files; the data read must equal the data written."""

    def make(folder: Path) -> Callable[[], object]:
        expected = _expected(source, policy)
        _copy(folder, source)
        change(folder)

        def action() -> None:
            assert _read_all(folder, source, policy) == expected, "other samples are read"

        return action

    return make


def _copy(folder: Path, source: str) -> None:
    for name in ("assets", source):
        shutil.copytree(_original() / name, folder / name)
    shutil.copy(_original() / "run.toml", folder)


# ------------------------------------------------------------------------------------------------------------ flips and cuts


def _changes(draw: random.Random, name: str, flips: int) -> Iterator[tuple[str, Change]]:
    """(name of the change, the change), spread over the whole file. `draw` decides where."""

    def edit(change: Callable[[bytearray], object]) -> Change:
        def apply(folder: Path) -> None:
            content = bytearray((folder / name).read_bytes())
            change(content)
            (folder / name).write_bytes(content)

        return apply

    def flip(place: float, bit: int) -> Change:
        def change(content: bytearray) -> None:
            content[int(place * len(content))] ^= 1 << bit

        return edit(change)

    def cut(place: float) -> Change:
        return edit(lambda content: content.__delitem__(slice(int(place * len(content)), None)))

    for number in range(flips):
        place, bit = (number + draw.random()) / flips, draw.randrange(8)
        yield f"bit {bit} at {place:.4f}", flip(place, bit)
    for place in (0.0, draw.random(), 0.9999):
        yield f"cut at {place:.4f}", cut(place)
    yield "a byte more", edit(lambda content: content.append(0))
    yield "zeros", edit(lambda content: content.__setitem__(slice(None), bytes(len(content))))
    yield "missing", lambda folder: (folder / name).unlink()


def _token_folders(draw: random.Random) -> Iterator[Case]:
    for file in [*_FILES, "manifest.json"]:
        for number, (what, change) in enumerate(_changes(draw, f"tokens/{file}", 8)):
            policy = list(_POLICIES)[number % len(_POLICIES)]
            yield Case(f"{file} under {policy}: {what}", _reading("tokens", policy, change), _TOKENS, right=True)


# ------------------------------------------------------------------------------------------------- files of other programs


# The part of an index with header, lengths and pointers. The rest, the first sequence of each document, has no redundancy.
_REPEATED = (34 + 12 * len(_TEXTS)) / (34 + 20 * len(_TEXTS) + 8)


def _pairs(draw: random.Random) -> Iterator[Case]:
    """Files without checksums: sizes, headers and the redundancy of the index remain, and the vocabulary."""
    for what, change in _changes(draw, "pair/00000.idx", 16):
        if "bit" not in what or float(what.split()[-1]) < _REPEATED:
            yield Case(f"pair, idx: {what}", _reading("pair", "mask", change), r"pair/00000\.", right=True)
    for what, change in _changes(draw, "pair/00000.bin", 0):
        if what != "zeros":  # ids of the vocabulary
            yield Case(f"pair, bin: {what}", _reading("pair", "pack", change), r"pair/00000\.")
    for source in ("pair", "tokens"):
        for wrong in (_VOCABULARY, 32_000, 65_535):
            for number, policy in enumerate(_POLICIES):
                at = 2 + number + draw.randrange(8)  # which "truncate" reads too
                change = functools.partial(_put_id, source=source, at=at, wrong=wrong)
                names = rf"{source}/00000\.bin, sample \d+: holds the id {wrong}, and"
                yield Case(f"id {wrong} in {source} under {policy}", _reading(source, policy, change), names)


def _put_id(folder: Path, source: str, at: int, wrong: int) -> None:
    """Writes another id at a token; in a folder of titanlite with matching checksums."""
    path = folder / source / "00000.bin"
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, 2 * at, wrong)
    path.write_bytes(content)
    if sums_of(path).exists():
        write_sums(path)


# -------------------------------------------------------------------------------------------------------------- checkpoints

_STEP, _DATA = "step-00000010", "__0_0.distcp"
_NUMBERS = {"step": 10, "samples": 8, "global_batch": 8, "data": {}, "config": {}, "architecture": {}}
_TENSORS = {"model.weight": torch.arange(48.0).reshape(8, 6), "model.bias": torch.arange(5.0), "scale": torch.tensor(2.0)}
# (offsets, sizes) of the parts: a mesh of two by two, three ranks one of which has nothing, one rank
_PARTS = {
    "model.weight": [((0, 0), (4, 3)), ((0, 3), (4, 3)), ((4, 0), (4, 3)), ((4, 3), (4, 3))],
    "model.bias": [((0,), (3,)), ((3,), (2,)), ((5,), (0,))],
    "scale": [((), ())],
}


def _write_checkpoint(folder: Path) -> None:
    """A checkpoint as DCP writes it on several ranks."""
    folder.mkdir()
    content, entries, storage = b"", {}, {}
    for name, tensor in _TENSORS.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in _PARTS[name]]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), chunks)
        for number, (offsets, sizes) in enumerate(_PARTS[name]):
            buffer = io.BytesIO()
            torch.save(tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone(), buffer)
            index = MetadataIndex(name, torch.Size(offsets), number)
            storage[index] = _StorageInfo(_DATA, len(content), len(buffer.getvalue()))
            content += buffer.getvalue()
    (folder / _DATA).write_bytes(content)
    _commit(folder, Metadata(entries, None, storage))


def _commit(folder: Path, metadata: Metadata) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    names = (METADATA, _DATA)
    files = {name: FileDigest((folder / name).stat().st_size, manifest.checksum(folder / name)) for name in names}
    manifest.write(folder, Manifest(_NUMBERS, files))


def _restoring(change: Change) -> Make:
    """Reads every tensor of a changed checkpoint, as a conversion does."""

    def make(folder: Path) -> Callable[[], object]:
        shutil.copytree(_original() / _STEP, folder / _STEP)
        change(folder)

        def action() -> None:
            stored = Stored(folder / _STEP)
            assert stored.entries.keys() == _TENSORS.keys(), "other tensors"
            for name, tensor in _TENSORS.items():
                assert torch.equal(stored.read(name), tensor), name

        return action

    return make


def _checkpoints(draw: random.Random) -> Iterator[Case]:
    for file in (_DATA, METADATA, manifest.FILE):
        for what, change in _changes(draw, f"{_STEP}/{file}", 8):
            yield Case(f"{file}: {what}", _restoring(change), rf"{_STEP}/(\.metadata|__0_0\.distcp|manifest\.json)")
    yield Case("a checkpoint of several ranks", _restoring(lambda _: None), "-", right=True)
    for what, forge in _FORGED.items():
        yield Case(f"forged: {what}", _restoring(functools.partial(_forge, forge=forge)), rf"{_STEP}/\.metadata: ")


def _forge(folder: Path, forge: Callable[[Metadata], object]) -> None:
    """Changed metadata, with a matching manifest."""
    metadata = pickle.loads((folder / _STEP / METADATA).read_bytes())
    forge(metadata)
    _commit(folder / _STEP, metadata)


def _tensor(metadata: Metadata, name: str = "model.weight") -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _set_part(metadata: Metadata, number: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Another range of a part."""
    _tensor(metadata).chunks[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _place(metadata: Metadata, number: int) -> _StorageInfo:
    return list(metadata.storage_data.values())[number]


def _change_size(metadata: Metadata, *size: int) -> None:
    _tensor(metadata).size = torch.Size(size)


def _drop(metadata: Metadata, number: int, storage: bool) -> None:
    chunk = _tensor(metadata).chunks.pop(number)
    if storage:
        del metadata.storage_data[MetadataIndex("model.weight", chunk.offsets)]


_FORGED: dict[str, Callable[[Metadata], object]] = {
    **{f"part {n} is missing": functools.partial(_drop, number=n, storage=True) for n in range(4)},
    "a part is missing, its bytes are not": lambda found: _drop(found, 3, storage=False),
    "no parts": lambda found: _tensor(found).chunks.clear(),
    "a part twice": lambda found: _tensor(found).chunks.append(_tensor(found).chunks[0]),
    "a larger part": lambda found: _set_part(found, 0, (0, 0), (4, 4)),
    "a smaller part": lambda found: _set_part(found, 0, (0, 0), (4, 2)),
    "a larger tensor": lambda found: _change_size(found, 9, 6),
    "a smaller tensor": lambda found: _change_size(found, 7, 6),
    "a tensor of 10^18 elements": lambda found: (_change_size(found, 10**9, 10**9), _tensor(found).chunks.clear()),
    "a tensor with no location": lambda found: found.storage_data.clear(),
    "a length below zero": lambda found: setattr(_place(found, 0), "length", -1),
    "bytes behind the end": lambda found: setattr(_place(found, 0), "offset", 10**12),
}


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(f"contents {seed}")
    for part in (_token_folders, _pairs, _checkpoints):
        yield from part(draw)
