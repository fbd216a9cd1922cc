"""What a path of the configuration stands for: token files made before, or text that is made into some at first use."""

import glob
import json
import logging
import os
import resource
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from tokenizers import Tokenizer

from titanlite.config.schema import Config, Source
from titanlite.data.cache import digest, making, once
from titanlite.data.indexed import TokenFile, path_of
from titanlite.data.packing import Packing, pack_file
from titanlite.data.prepare.chat import ChatTemplate, load_template
from titanlite.data.prepare.documents import STDLIB, list_inputs, stdlib_files
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import HUB, BadDocument, is_url
from titanlite.data.tokenizer import LoadedTokenizer, describe, load_tokenizer, tokenizer_digest, train_tokenizer
from titanlite.errors import UserError
from titanlite.files import cache_folder

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_VERSION = "2"  # part of every cache key: raise it when the same files would give other tokens
_PROBES, _PROBE_BYTES = 16, 4096


class Opened(NamedTuple):
    """The token files of one source, and what is known of them."""

    keys: Source
    name: str
    files: list[TokenFile]
    fingerprint: str  # equal fingerprints mean equal tokens, for files of others with high probability
    manifest: dict[str, Any] | None  # None: files of others, whose ids are looked at as they are read


def sources_of(config: Config, section: str) -> list[Source]:
    """The sources of [training] or [validation]; `dataset` and `dataset_path` name a single one.

    Raises UserError where more than one of these keys names data, or weights and names are not complete.
    """
    keys = getattr(config, section)
    given = {"dataset": keys.dataset != STDLIB, "dataset_path": bool(keys.dataset_path), "sources": bool(keys.sources)}
    if sum(given.values()) > 1:
        texts = {"dataset": f" = {keys.dataset!r}", "dataset_path": f" = {keys.dataset_path!r}", "sources": ""}
        names = " and ".join(f"{section}.{key}{texts[key]}" for key, is_given in given.items() if is_given)
        raise UserError(f"{names} both name data; give one of them")
    sources = keys.sources or [Source(path=keys.dataset_path or keys.dataset)]
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        missing = next(source for source in sources if source.weight is None)
        raise UserError(f'{section}.sources: "{missing.path}" has no weight, others have; give all of them one, or none')
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
    keys = getattr(config, section)
    return f"{section}.{'sources' if keys.sources else 'dataset_path' if keys.dataset_path else 'dataset'}"


def find(path: str, key: str) -> list[Path] | None:
    """The token files at a path, without suffixes, or None for text. Raises UserError for what is neither."""
    place = Path(path) if Path(path).name else Path(path).absolute()
    if place.suffix in (".bin", ".idx") and not place.is_dir():
        place = place.with_suffix("")
    if place.name and (path_of(place, "idx").is_file() or path_of(place, "bin").is_file()):  # "/" has no name
        return [place]
    if (place / MANIFEST).is_file():
        return [place / shard["name"] for shard in read_manifest(place)["shards"]]
    if place.is_dir() and any(place.glob("*.idx")):
        # a .bin whose .idx was not copied along is to be missed, not left out
        return sorted({file.with_suffix("") for suffix in ("bin", "idx") for file in place.glob(f"*.{suffix}")})
    if (place / "plan.json").is_file() or (not place.exists() and place.with_name(f"{place.name}.unfinished").is_dir()):
        raise UserError(f'{key} = "{path}": not finished: give the same `titanlite tokenize` command again, it goes on')
    if not (place.exists() or path == STDLIB or path.startswith(HUB) or is_url(path) or glob.has_magic(path)):
        raise UserError(f'{key} = "{path}": no such file or folder; the built-in data is called "{STDLIB}"')
    list_inputs(_text_inputs(path), f"{key} =")
    return None


def _text_inputs(path: str) -> list[str]:
    """What `list_inputs` is to look for under a path of the configuration."""
    return [str(file) for file in stdlib_files()] if path == STDLIB and not Path(path).exists() else [path]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that `titanlite tokenize` has written. Raises UserError."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not {"format", "tokenizer", "largest_id", "documents", "tokens", "shards", "fingerprint"} <= set(manifest):
            raise ValueError("it lacks entries")
        if manifest["format"] != 1:
            raise ValueError(f"format {manifest['format']}, and only 1 is known")
        if any(Path(shard["name"]).name != shard["name"] for shard in manifest["shards"]):
            raise ValueError("a shard is not in its folder")
        if not all({"documents", "tokens", "loss"} <= set(shard) for shard in manifest["shards"]):
            raise ValueError("a shard lacks entries")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not a manifest of `titanlite tokenize`: {error}") from None
    return manifest


def open_source(source: Source, key: str, loaded: LoadedTokenizer, assets: str, vocabulary: int) -> Opened:
    """Opens a source, after making tokens of it where it is text; several processes may ask at once.

    key: names the source in messages; assets: model.hf_assets_path; vocabulary: of the model, which ids must be below.
    Raises UserError that names the file at fault.
    """
    prefixes, folder = find(source.path, key), Path(source.path)
    if prefixes is None:
        folder = _prepared(source.path, key, loaded, assets)
        prefixes = find(str(folder), key)
    assert prefixes is not None
    _allow_many_files(len(prefixes))
    files = [TokenFile(prefix) for prefix in prefixes]
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    if manifest is None:
        paths = [path_of(file.prefix, suffix) for file in files for suffix in ("bin", "idx", "loss")]
        fingerprint = digest(*(_probe(path) for path in paths if path.suffix != ".loss" or path.exists()))
        return Opened(source, name_of(source), files, fingerprint, None)
    _check_manifest(manifest, folder, files, loaded, vocabulary)
    return Opened(source, name_of(source), files, manifest["fingerprint"], manifest)


def open_packing(file: TokenFile, fingerprint: str, seq_len: int) -> Packing:
    """The best-fit rows of a file: those that lie beside it, or else of the cache, where they are made at first use."""
    beside = file.prefix.with_name(f"{file.prefix.name}.best_fit-{seq_len}.npy")
    if beside.is_file():
        try:
            packing = Packing(beside)
        except ValueError as error:
            raise UserError(f"{beside}: not a packing: {error}; remove it, and it is made anew") from None
        if packing.of != (file.tokens, file.documents):
            raise UserError(f"{beside}: is not of {file.prefix.name}.bin as it is now; remove it, and it is made anew")
        return packing

    def make(path: Path) -> None:
        log.info("packing %s, once; kept in %s", file.prefix, cache_folder())
        pack_file(file.prefix, seq_len, path)

    key = digest(_VERSION, fingerprint, file.prefix.name, str(seq_len))
    return once(cache_folder() / f"packing-{key}.npy", make, Packing)


def _prepared(path: str, key: str, loaded: LoadedTokenizer, assets: str) -> Path:
    """The folder of tokens made of text, from the cache or made now.

    Names, sizes and times of the files tell whether they have changed; contents are not read again at each start.
    """
    names = _text_inputs(path)
    found = list_inputs(names, f"{key} =")
    facts = [f"{entry.path} {entry.size} {entry.stamp}" for entry in found]
    template = load_template(assets) if assets else None
    chat = template.source if template else ""
    folder = cache_folder() / f"tokens-{digest(_VERSION, tokenizer_digest(loaded), chat, *facts)}"
    if not folder.is_dir():
        with making(folder):
            if not folder.is_dir():
                log.info("tokenizing %s, once; kept in %s", path, cache_folder())
                _prepare(names, folder, loaded, template, key)
    return folder


def _prepare(names: list[str], folder: Path, loaded: LoadedTokenizer, template: ChatTemplate | None, key: str) -> None:
    """Makes tokens of text. Of text that is at fault nothing is kept: once it is mended, its tokens have another name."""
    try:
        prepare(
            names, folder, loaded, append_eos=True, workers=os.cpu_count() or 1, shard_tokens=10**9, on_error="fail",
            chat=template, key=f"{key} =",
        )  # fmt: skip
    except BadDocument:
        shutil.rmtree(folder.with_name(f"{folder.name}.unfinished"), ignore_errors=True)
        raise


def open_tokenizer(assets: str) -> LoadedTokenizer:
    """The tokenizer of `model.hf_assets_path`, or where that is empty the default one, trained at first use."""
    if assets:
        return load_tokenizer(assets)
    files = stdlib_files()

    def make(path: Path) -> None:
        log.info("training the default tokenizer on %d files, once; kept in %s", len(files), cache_folder())
        train_tokenizer(file.read_text(encoding="utf-8") for file in files).save(str(path))

    facts = (f"{file} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files)
    path = cache_folder() / f"tokenizer-{digest(_VERSION, *facts)}.json"
    return describe(once(path, make, lambda path: Tokenizer.from_file(str(path))), None, str(path))


def _check_manifest(
    manifest: dict[str, Any], folder: Path, files: list[TokenFile], loaded: LoadedTokenizer, vocabulary: int
) -> None:
    if manifest["tokenizer"] != tokenizer_digest(loaded):
        raise UserError(
            f"{folder}: made with another tokenizer than that of model.hf_assets_path; set it to the folder that was given "
            "as --tokenizer"
        )
    if manifest["largest_id"] >= vocabulary:
        raise UserError(f"{folder}: has ids up to {manifest['largest_id']}, and the model's vocabulary is {vocabulary}")
    for file, shard in zip(files, manifest["shards"], strict=True):
        if (file.documents, file.tokens) != (shard["documents"], shard["tokens"]):
            raise UserError(
                f"{file.prefix}.bin: has {file.documents:,} documents of {file.tokens:,} tokens; {MANIFEST} says "
                f"{shard['documents']:,} of {shard['tokens']:,}"
            )
        if shard["loss"] and file.loss is None:
            raise UserError(f"{file.prefix}.loss: is missing; without it what users of chats say would be predicted too")


def _probe(path: Path) -> str:
    """A digest of a file's size and of some places in it, evenly spread: of a terabyte it reads 64 KiB."""
    size = path.stat().st_size
    found = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        for number in range(_PROBES):
            file.seek(max(0, size - _PROBE_BYTES) * number // (_PROBES - 1))
            found.update(file.read(_PROBE_BYTES))
    return found.hexdigest()


def _allow_many_files(count: int) -> None:
    """A mapped file counts as an open one, and a trillion tokens are a thousand shards of two files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + 3 * count
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
