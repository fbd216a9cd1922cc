"""One row of token ids, prepared once and kept in a cache: what training reads its samples from."""

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from titanlite.config import Config
from titanlite.data.documents import STDLIB, list_files, read_documents
from titanlite.data.tokenizer import LoadedTokenizer, byte_lengths, describe, load_tokenizer, train_tokenizer
from titanlite.errors import UserError

log = logging.getLogger(__name__)

_VERSION = "1"  # part of every cache key: raise it when the same files would give other tokens
_DOCUMENTS_AT_ONCE = 512


class TokenData(NamedTuple):
    """The documents as one row of ids, each closed by the end-of-text id, in a memory-mapped file."""

    ids: np.ndarray  # (tokens,) uint16 or uint32
    vocabulary: int  # ids are below this
    documents: int
    fingerprint: str  # of texts and tokenizer: equal fingerprints mean equal ids
    byte_lengths: np.ndarray  # (vocabulary,) int64, bytes of text that each id stands for


def cache_folder() -> Path:
    """$TITANLITE_CACHE, else titanlite/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TITANLITE_CACHE") or Path(base) / "titanlite")


def prepare_tokens(config: Config, section: str = "training") -> TokenData:
    """The token ids of the data of [training] or [validation], from the cache or made now. Several processes may ask at once.

    Raises UserError for data or a tokenizer that cannot be used.
    """
    keys = getattr(config, section)
    files = list_files(keys.dataset, keys.dataset_path, section)
    loaded = open_tokenizer(config)
    fingerprint = _digest(_VERSION, loaded.tokenizer.to_str(), _content_key(files))

    def make(path: Path) -> None:
        log.info("tokenizing %d files, once; kept in %s", len(files), cache_folder())
        _tokenize(files, loaded, path)

    ids = _once(cache_folder() / f"tokens-{fingerprint}.npy", make, lambda path: np.load(path, mmap_mode="r"))
    documents = int((ids == loaded.end_of_text).sum())
    if len(ids) <= config.training.seq_len:
        raise UserError(
            f"training.seq_len = {config.training.seq_len}: the data of [{section}] has {len(ids)} tokens, not one whole sample"
        )
    return TokenData(ids, loaded.vocabulary, documents, fingerprint, byte_lengths(loaded))


def open_tokenizer(config: Config) -> LoadedTokenizer:
    """The tokenizer of `model.hf_assets_path`, or where that is empty the default one, trained at first use."""
    if config.model.hf_assets_path:
        return load_tokenizer(config.model.hf_assets_path)
    files = list_files(STDLIB, "")

    def make(path: Path) -> None:
        log.info("training the default tokenizer on %d files, once; kept in %s", len(files), cache_folder())
        train_tokenizer(read_documents(files)).save(str(path))

    path = cache_folder() / f"tokenizer-{_digest(_VERSION, _content_key(files))}.json"
    return describe(_once(path, make, lambda path: Tokenizer.from_file(str(path))), None, str(path))


def _tokenize(files: list[Path], loaded: LoadedTokenizer, path: Path) -> None:
    kind = np.uint16 if loaded.vocabulary <= 2**16 else np.uint32
    parts = [np.zeros(0, kind)]
    texts = iter(tqdm(read_documents(files), desc="tokenizing", unit=" documents", disable=None))  # no bar in a log file
    while batch := list(itertools.islice(texts, _DOCUMENTS_AT_ONCE)):
        for encoding in loaded.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, loaded.end_of_text], kind))
    with open(path, "wb") as file:
        np.save(file, np.concatenate(parts))


def _once(path: Path, make: Callable[[Path], None], read: Callable[[Path], Any]) -> Any:
    """What `read` finds at `path`, which `make` makes if it is not there: one process does, others wait, whole or not at all.

    A file that cannot be read is made again. Raises UserError where the cache folder cannot be written.
    """
    with contextlib.suppress(Exception):  # not there, or damaged: both are mended below
        return read(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            with contextlib.suppress(Exception):  # another process has made it meanwhile
                return read(path)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            try:
                make(unfinished)
                with open(unfinished, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}; TITANLITE_CACHE names another folder for it") from None
    return read(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _content_key(files: list[Path]) -> str:
    """A digest of the files' contents in order; names and dates do not matter, kinds do."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            with open(file, "rb") as stream:
                content = hashlib.file_digest(stream, "blake2b") if hasattr(hashlib, "file_digest") else None
                content = content or hashlib.blake2b(stream.read())
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
        digest.update(file.suffix.encode() + content.digest())
    return digest.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
