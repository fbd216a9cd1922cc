"""What a path of the configuration stands for: existing token files, or text that is tokenized at first use and cached."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from titanlite.config.schema import Config, Source
from titanlite.data.blocks import check_sums
from titanlite.data.indexed import TokenFile, path_of
from titanlite.data.packing import Packing, pack_file
from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.documents import list_inputs, stdlib_files
from titanlite.data.prepare.manifest import MANIFEST, read_manifest
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import BadDocument
from titanlite.data.tokenizer import (
    LoadedTokenizer,
    describe,
    digest,
    load_tokenizer,
    parse_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)
from titanlite.errors import UserError
from titanlite.files import cache_folder, publish, sync_contents
from titanlite.outside import MIB, open_file, read_text
from titanlite.transforms.registry import family_of

log = logging.getLogger(__name__)

Cached = TypeVar("Cached")

_VERSION = "3"  # part of every cache key: raise it when the same files would give other tokens
_PROBES, _PROBE_BYTES = 16, 4096
_SOURCE = 64 * MIB  # of a file of the standard library


class TokenSource(NamedTuple):
    """The token files of one source."""

    cfg: Source
    name: str
    files: list[TokenFile]
    fingerprint: str  # equal fingerprints mean equal tokens; for foreign files only with high probability
    manifest: dict[str, Any] | None  # None: foreign files, whose ids are checked as they are read


def sources_of(config: Config, section: str) -> list[Source]:
    """The sources of [training] or [validation]; `dataset` and `dataset_path` name a single one.

    Raises UserError for incomplete weights or names.
    """
    cfg = getattr(config, section)
    sources = cfg.sources or [Source(path=cfg.dataset_path or cfg.dataset)]
    unweighted = [source.path for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(sources):
        raise UserError(f'{section}.sources: "{unweighted[0]}" has no weight, others have; give all of them one, or none')
    if section == "validation" and (idle := [s for s in sources if s.weight is not None or s.epochs is not None]):
        raise UserError(
            f'validation.sources: weight and epochs of "{idle[0].path}" have no effect; each source is measured by itself'
        )
    names = [name_of(source) for source in sources]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f'{section}.sources: two are called "{twice}"; give each a name of its own')
    return sources


def name_of(source: Source) -> str:
    """What reports call a source: its `name`, or the last part of its path."""
    return source.name or Path(source.path).absolute().name


def key_of(config: Config, section: str) -> str:
    """The key that names the data of a section, for messages."""
    cfg = getattr(config, section)
    return f"{section}.{'sources' if cfg.sources else 'dataset_path' if cfg.dataset_path else 'dataset'}"


def find(path: str, key: str) -> list[Path] | None:
    """The token files at a path, without suffixes, or None for text. Raises UserError for anything else."""
    place = Path(path).absolute()
    if place.suffix in (".bin", ".idx") and not place.is_dir():
        place = place.with_suffix("")
    if place.name and (path_of(place, "idx").is_file() or path_of(place, "bin").is_file()):  # "/" has no name
        return [place]
    if os.path.lexists(place / MANIFEST):
        return [place / shard["name"] for shard in read_manifest(place)["shards"]]
    if place.is_dir() and any(place.glob("*.idx")):
        # a .bin whose .idx is missing is an error later, not left out here
        return sorted({file.with_suffix("") for suffix in ("bin", "idx") for file in place.glob(f"*.{suffix}")})
    if (place / "plan.json").is_file() or (not place.exists() and place.with_name(f"{place.name}.unfinished").is_dir()):
        raise UserError(f'{key} = "{path}": not finished: run the same `titanlite tokenize` command again, it continues')
    list_inputs([path], f"{key} =")
    return None


def open_source(source: Source, key: str, loaded: LoadedTokenizer, assets: str, vocabulary: int) -> TokenSource:
    """Opens, validates and fingerprints a source; tokenizes it before if it is text. Several processes may call it at once.

    key: names the source in messages; assets: model.hf_assets_path; vocabulary: of the model, an upper bound of the ids.
    Raises UserError that names the faulty file.
    """
    prefixes, folder = find(source.path, key), Path(source.path)
    if prefixes is None:
        folder = _tokenized(source.path, key, loaded, assets)
        prefixes = find(str(folder), key)
    assert prefixes is not None
    files, manifest = _open_files(prefixes, folder, loaded, vocabulary)
    if not all(stored.has_sums for file in files for stored in file.files):
        log.info("%s: has no checksums of blocks, which `titanlite tokenize` writes: damage is not detected", source.path)
    if manifest is not None:
        fingerprint = manifest["fingerprint"]
    else:
        suffixes = [(file, suffix) for file in files for suffix in ("bin", "idx", "loss") if suffix != "loss" or file.has_loss]
        fingerprint = digest(*(_probe(path_of(file.prefix, suffix)) for file, suffix in suffixes))
    return TokenSource(source, name_of(source), files, fingerprint, manifest)


def _open_files(
    prefixes: list[Path], folder: Path, loaded: LoadedTokenizer, vocabulary: int
) -> tuple[list[TokenFile], dict[str, Any] | None]:
    """The token files of a source, and the manifest that they are checked against; foreign files have none."""
    files = [TokenFile(prefix) for prefix in prefixes]
    if not os.path.lexists(folder / MANIFEST):
        for file in files:
            _check_beginning(file.prefix, _foreign_beginning(file, loaded), loaded)
        return files, None
    manifest = read_manifest(folder)
    if manifest["tokenizer"] != tokenizer_digest(loaded):
        raise UserError(
            f"{folder}: made with another tokenizer than that of model.hf_assets_path; set it to the folder that was given "
            "as --tokenizer"
        )
    _check_beginning(folder, tuple(manifest.get("beginning_of_text", ())), loaded)  # before that entry, none was written
    if manifest["largest_id"] >= vocabulary:
        raise UserError(f"{folder}: has ids up to {manifest['largest_id']}, and the model's vocabulary is {vocabulary}")
    for file, shard in zip(files, manifest["shards"], strict=True):
        check_sums(manifest, file.files)
        if (file.documents, file.tokens) != (shard["documents"], shard["tokens"]):
            raise UserError(
                f"{file.prefix}.bin: has {file.documents:,} documents of {file.tokens:,} tokens; {MANIFEST} says "
                f"{shard['documents']:,} of {shard['tokens']:,}"
            )
        if shard["loss"] and not file.has_loss:
            raise UserError(f"{file.prefix}.loss: is missing; without it the loss would include the user's turns of chats")
    return files, manifest


def _check_beginning(path: Path, beginning: tuple[int, ...], loaded: LoadedTokenizer) -> None:
    """Raises UserError for token files whose texts begin otherwise than training.add_bos, or without it the tokenizer, says."""
    if beginning != loaded.beginning:
        raise UserError(
            f"{path}: its texts begin with {loaded.spelled(beginning)}, and those of this run with "
            f"{loaded.spelled(loaded.beginning)}, as training.add_bos says, or where that is not set the tokenizer; set "
            f"training.add_bos = {json.dumps(bool(beginning))}, or tokenize the text again"
        )


def _foreign_beginning(file: TokenFile, loaded: LoadedTokenizer) -> tuple[int, ...]:
    """The beginning-of-text ids of another tool's file, by its first document.

    Nothing is known of an empty file, nor where the same id also ends documents: then the configuration is believed.
    """
    if not file.tokens or loaded.bos in ((), (loaded.end_of_text,)):
        return loaded.beginning
    begin = int(file.boundaries(0, 1)[0])
    return loaded.bos if tuple(file.ids[begin : begin + len(loaded.bos)].tolist()) == loaded.bos else ()


def _probe(path: Path) -> str:
    """A digest of a file's size and of 16 evenly spread blocks: it reads 64 KiB of a terabyte."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        result = xxhash.xxh3_128(str(size).encode())
        for number in range(_PROBES):
            file.seek(max(0, size - _PROBE_BYTES) * number // (_PROBES - 1))
            result.update(file.read(_PROBE_BYTES))
    return result.hexdigest()


# ------------------------------------------------------------------------------------------------------------- the cache


def open_packing(file: TokenFile, fingerprint: str, seq_len: int) -> Packing:
    """The best-fit rows of a file: those beside it, else those in the cache, which are made at first use."""
    beside = file.prefix.with_name(f"{file.prefix.name}.best_fit-{seq_len}.npy")
    if os.path.lexists(beside):
        try:
            return Packing(beside, file)
        except ValueError as error:
            raise UserError(f"{beside}: not of {file.prefix.name}.bin: {error}; remove it, and it is made again") from None

    def make(folder: Path) -> None:
        log.info("packing %s, once; kept in %s", file.prefix, cache_folder())
        folder.mkdir()
        pack_file(file.prefix, seq_len, folder / "rows.npy")
        sync_contents(folder)

    key = digest(_VERSION, fingerprint, file.prefix.name, str(seq_len))
    return _cached(cache_folder() / f"packing-{key}", make, lambda folder: Packing(folder / "rows.npy", file))


def open_tokenizer(assets: str, add_bos: bool | None = None) -> LoadedTokenizer:
    """The tokenizer of `model.hf_assets_path`, or where that is empty the default one, trained at first use.

    add_bos: as training.add_bos; the default tokenizer has no such token.
    """
    if assets:
        return load_tokenizer(assets, add_bos=add_bos)
    files = stdlib_files()

    def make(path: Path) -> None:
        log.info("training the default tokenizer on %d files, once; kept in %s", len(files), cache_folder())
        train_tokenizer(read_text(file, _SOURCE) for file in files).save(str(path))

    stamps = (f"{file} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files)
    path = cache_folder() / f"tokenizer-{digest(_VERSION, *stamps)}.json"
    return describe(_cached(path, make, parse_tokenizer), None, str(path))


def _tokenized(path: str, key: str, loaded: LoadedTokenizer, assets: str) -> Path:
    """The folder of token files of a text, from the cache or made now.

    Names, sizes and times of the files tell whether they have changed; contents are not read again at each start.
    """
    stamps = [f"{entry.path} {entry.size} {entry.stamp}" for entry in list_inputs([path], f"{key} =")]
    template = load_template(assets) if assets else None
    name = digest(_VERSION, tokenizer_digest(loaded), template.source if template else "", str(loaded.beginning), *stamps)

    def make(folder: Path) -> None:
        log.info("tokenizing %s, once; kept in %s", path, cache_folder())
        try:
            prepare(
                [path], folder, loaded, append_eos=True, workers=os.cpu_count() or 1, shard_tokens=10**9, on_error="fail",
                chat=template, key=f"{key} =",
            )  # fmt: skip
        except BadDocument:  # the corrected text will have another name
            shutil.rmtree(folder.with_name(f"{folder.name}.unfinished"), ignore_errors=True)
            raise

    folder = cache_folder() / f"tokens-{name}"
    _cached(folder, make, read_manifest)
    return folder


def _cached(path: Path, make: Callable[[Path], object], read: Callable[[Path], Cached]) -> Cached:
    """Reads `path`, which one process makes first if it is missing or damaged, while others wait. Written atomically.

    make: writes a file or a folder. Raises UserError where the cache folder cannot be written.
    """
    with contextlib.suppress(Exception):  # missing or damaged
        return read(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(Exception):  # another process has made it meanwhile
                return read(path)
            unfinished = path.with_name(f"{path.name}.tmp")
            for leftover in (unfinished, path):  # of a start that was killed before its last rename; damaged
                _remove(leftover)
            try:
                make(unfinished)
                publish(unfinished, path)
            finally:
                _remove(unfinished)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}; TITANLITE_CACHE names another folder for it") from None
    return read(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def faults(config: Config) -> Iterator[str]:
    """Keys that do not name data, and token files that cannot be used. Text is only checked to exist."""
    for section in ("training", *(["validation"] if config.validation.enable else [])):
        try:
            sources = sources_of(config, section)
        except UserError as error:
            yield str(error)
            continue
        for source in sources:
            try:
                if (prefixes := find(source.path, key_of(config, section))) is not None:
                    loaded = open_tokenizer(config.model.hf_assets_path, config.training.add_bos)
                    vocabulary = family_of(config.model).config.vocab_size
                    _open_files(prefixes, Path(source.path), loaded, vocabulary)
            except UserError as error:
                yield str(error)
