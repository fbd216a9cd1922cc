"""Files created at first use and kept in the cache folder: token files of a text, packed rows, the default tokenizer."""

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titanlite.data.indexed import TokenFile
from titanlite.data.packing import Packing
from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.documents import list_inputs, stdlib_files
from titanlite.data.prepare.encode import render
from titanlite.data.prepare.manifest import read_manifest
from titanlite.data.prepare.open_files import is_url
from titanlite.data.prepare.packing import pack_file
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import HUB, Bad, BadDocument, Document, describe_location, read, where
from titanlite.data.tokenizer import (
    DEFAULT_VOCABULARY,
    END_OF_TEXT,
    LoadedTokenizer,
    describe,
    digest,
    read_tokenizer,
    tokenizer_digest,
)
from titanlite.ground.files import cache_folder, publish, sync_contents, unfinished_path, writing
from titanlite.ground.untrusted import MIB, read_text
from titanlite.launch.layout import cores

log = logging.getLogger(__name__)

Cached = TypeVar("Cached")

_VERSION = "5"  # part of every cache key: increment it when the same files give other tokens
_SOURCE = 64 * MIB  # the largest file of the standard library


def tokenized(path: str, key: str, loaded: LoadedTokenizer, assets: str) -> Path:
    """The folder of token files of a text, from the cache or created now.

    Names, sizes and modification times show whether the text has changed; a start does not read its contents again.
    """
    inputs = list_inputs([path], f"{key} =")
    if not all(entry.stamp for entry in inputs):
        log.warning("%s: its server gives no time or checksum: a change that keeps the size of a file is not noticed", path)
    stamps = [f"{entry.path} {entry.size} {entry.stamp}" for entry in inputs]
    template = load_template(assets) if assets else None
    edges = str([loaded.beginning, loaded.end_of_text])  # which tokenizer_config.json decides, not tokenizer.json alone
    name = digest(_VERSION, tokenizer_digest(loaded), template.source if template else "", edges, *stamps)

    def make(folder: Path) -> None:
        log.info("tokenizing %s, once; kept in %s", path, cache_folder())
        try:
            prepare(
                [path], folder, loaded, append_eos=True, workers=cores(), shard_tokens=10**9, on_error="fail",
                chat=template, key=f"{key} =",
            )  # fmt: skip
        except BadDocument as error:  # the corrected text will have another cache key
            shutil.rmtree(unfinished_path(folder), ignore_errors=True)
            raise BadDocument(f"{error}\n{_skipping(key)}") from None

    folder = cache_folder() / f"tokens-{name}"
    _cached(folder, make, read_manifest)
    return folder


def first_fault(path: str, key: str, assets: str) -> str | None:
    """Why the first document of a text cannot be tokenized: shows a wrong column or a missing chat template before a start.

    Reads local files only, of kinds that give their first document without the others.
    """
    if is_url(path) or path.startswith(HUB):
        return None
    part = next((part for entry in list_inputs([path], f"{key} =") for part in entry.parts), None)
    if part is None or part.kind in ("text", "json"):
        return None
    found: Any = next(read(part, "text"), None)
    if isinstance(found, Document) and isinstance(found.content, list):
        found = render(load_template(assets) if assets else None, found)
    if not isinstance(found, Bad):
        return None
    return f'{key} = "{path}": {describe_location(*where(part, found.location))}: {found.reason}; {_skipping(key)}'


def _skipping(key: str) -> str:
    return f"`titanlite tokenize --on-error skip --append-eos` leaves such entries out; then {key} names its output"


def open_packing(file: TokenFile, contents: str, seq_len: int) -> Packing:
    """The best-fit rows of a file, from the cache or created now. contents: identifies those of the file."""

    def make(folder: Path) -> None:
        log.info("packing %s, once; kept in %s", file.prefix, cache_folder())
        folder.mkdir()
        pack_file(file.prefix, seq_len, folder / "rows.npy")
        sync_contents(folder)

    key = digest(_VERSION, contents, str(seq_len))
    return _cached(cache_folder() / f"packing-{key}", make, lambda folder: Packing(folder / "rows.npy"))


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of 4,096 entries (Sennrich et al., arXiv:1508.07909), the same for the same documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=DEFAULT_VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def default_tokenizer() -> LoadedTokenizer:
    """The default tokenizer, trained on Python's standard library at first use."""
    files = stdlib_files()

    def make(path: Path) -> None:
        log.info("training the default tokenizer on %d files, once; kept in %s", len(files), cache_folder())
        train_tokenizer(read_text(file, _SOURCE) for file in files).save(str(path))

    stamps = (f"{file} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files)
    path = cache_folder() / f"tokenizer-{digest(_VERSION, *stamps)}.json"
    return describe(_cached(path, make, read_tokenizer), None, str(path))


def _cached(path: Path, make: Callable[[Path], object], read: Callable[[Path], Cached]) -> Cached:
    """Reads `path`. If it is missing or damaged, one process creates it first, atomically, while others wait.

    make: writes a file or a folder. Raises UserError where the cache folder cannot be written.
    """
    with contextlib.suppress(Exception):  # missing or damaged
        return read(path)
    with writing(path, "; set TITANLITE_CACHE to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(Exception):  # another process has created it meanwhile
                return read(path)
            unfinished = path.with_name(f"{path.name}.tmp")
            for leftover in (unfinished, path):  # left by a process that was killed before the rename; damaged
                _remove(leftover)
            try:
                make(unfinished)
                publish(unfinished, path)
            finally:
                _remove(unfinished)
    return read(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
