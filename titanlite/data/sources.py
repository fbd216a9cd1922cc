"""What a path of the configuration stands for: token files, or text, which `prepare/cache.py` tokenizes at first use."""

import bisect
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from titanlite.config.schema import Config, Source, Training
from titanlite.data.indexed import TokenFile, path_of
from titanlite.data.prepare.cache import default_tokenizer, first_fault, open_packing, tokenized
from titanlite.data.prepare.documents import list_inputs
from titanlite.data.prepare.manifest import MANIFEST, read_manifest
from titanlite.data.samples import Row, Rows, rows_of
from titanlite.data.tokenizer import LoadedTokenizer, digest, load_tokenizer, tokenizer_digest
from titanlite.ground.errors import UserError
from titanlite.ground.files import unfinished_path
from titanlite.ground.untrusted import open_file
from titanlite.launch.layout import rank_and_world
from titanlite.registry.own import is_part

log = logging.getLogger(__name__)

_PROBES, _PROBE_BYTES = 16, 4096


class TokenSource(NamedTuple):
    """The token files of one source, and their rows under the settings of a run."""

    cfg: Source
    name: str
    files: list[TokenFile]
    fingerprint: str  # equal fingerprints mean equal tokens; for foreign files only with high probability
    folder: Path | None = None  # with their manifest, whose list of inputs may have 60 MB; None: files of another tool
    rows: Sequence[Rows] = ()  # of each file
    ends: Sequence[int] = ()  # cumulative rows of the files

    def with_rows(self, training: Training, key: str) -> "TokenSource":
        """The source with its rows. key: names it in messages. Raises UserError where it has not one whole sample."""
        length, policy, rows = training.seq_len, training.document_policy, []
        for number, file in enumerate(self.files):  # not by its name, which another one may get
            packing = open_packing(file, f"{self.fingerprint} {number}", length) if policy == "best_fit" else None
            rows.append(rows_of(file, length, policy, training.document_mask, packing))
        # rows of titanlite 0.3 had another order: a run that continues them must be asked, as for another text
        fingerprint = digest(self.fingerprint, "rows in a random order") if policy == "best_fit" else self.fingerprint
        ends = list(itertools.accumulate(part.count for part in rows))
        found = self._replace(fingerprint=fingerprint, rows=rows, ends=ends)
        if not found.kept:
            raise UserError(f"training.seq_len = {length}: {key}: {self.name} has {self.tokens:,} tokens, not one whole sample")
        return found

    @property
    def samples(self) -> int:
        """In an epoch."""
        return self.ends[-1]

    @property
    def kept(self) -> int:
        """Tokens in all rows."""
        return sum(rows.tokens for rows in self.rows)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    @property
    def documents(self) -> int:
        return sum(file.documents for file in self.files)

    def where(self, sample: int) -> str:
        """The place of a sample, for messages."""
        rows, row = self.locate(sample)
        return f"{rows.file.prefix}.bin, sample {row}"

    def read(self, sample: int) -> Row:
        """One row. Raises UserError for a file that was truncated."""
        rows, row = self.locate(sample)
        for stored in rows.stored:
            stored.check_size()
        file = rows.file
        return Row(rows.pieces(row), file.ids.checked(), None if file.loss is None else file.loss.checked())

    def locate(self, sample: int) -> tuple[Rows, int]:
        """The rows of the file that holds a sample, and the sample's row there."""
        number = bisect.bisect_right(self.ends, sample)
        rows = self.rows[number]
        return rows, sample - (self.ends[number] - rows.count)


def sources_of(config: Config, section: str) -> list[Source]:
    """The sources of [training] or [validation]; `dataset` and `dataset_path` name a single one.

    Raises UserError for incomplete weights or names, and for options that no part takes.
    """
    cfg = getattr(config, section)
    sources = cfg.sources or [Source(path=cfg.dataset_path or cfg.dataset, options=cfg.dataset_options)]
    if is_part(cfg.dataset_path):
        raise UserError(f'{section}.dataset_path = "{cfg.dataset_path}": give data of your own as {section}.dataset')
    if taken := next((source for source in sources if source.options and not is_part(source.path)), None):
        raise UserError(f'{section}: the options of "{taken.path}" have no effect; only "package.module:name" takes options')
    unweighted = [source.path for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(sources):
        raise UserError(f'{section}.sources: "{unweighted[0]}" has no weight, others have; give all of them one, or none')
    if section == "validation" and (idle := [s for s in sources if s.weight is not None or s.epochs is not None]):
        raise UserError(f'validation.sources: weight and epochs of "{idle[0].path}" have no effect; each is measured by itself')
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
    base = Path(path).absolute()
    if base.suffix in (".bin", ".idx") and not base.is_dir():
        base = base.with_suffix("")
    if base.name and (path_of(base, "idx").is_file() or path_of(base, "bin").is_file()):  # "/" has no name
        return [base]
    if os.path.lexists(base / MANIFEST):
        return [base / shard["name"] for shard in read_manifest(base)["shards"]]
    if base.is_dir() and any(base.glob("*.idx")):
        # a .bin whose .idx is missing is an error later, not left out here
        return sorted({file.with_suffix("") for suffix in ("bin", "idx") for file in base.glob(f"*.{suffix}")})
    if (base / "plan.json").is_file() or (not base.exists() and unfinished_path(base).is_dir()):
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
        folder = tokenized(source.path, key, loaded, assets)
        prefixes = find(str(folder), key)
    assert prefixes is not None
    files, manifest = _open_files(prefixes, folder, loaded, vocabulary)
    end = manifest.get("end_of_text", loaded.end_of_text) if manifest else loaded.end_of_text
    if end != loaded.end_of_text and manifest and not manifest.get("chats") and rank_and_world()[0] == 0:
        theirs, ours = "nothing" if end is None else loaded.spelled([end]), loaded.spelled([loaded.end_of_text])
        why = "the model does not learn to end one; `titanlite tokenize --append-eos` writes it"
        log.warning("%s: its texts end with %s, not with %s: %s", folder, theirs, ours, why)
    inside = manifest is None and prefixes[0].parent == Path(os.path.abspath(folder))
    if inside and (more := sorted(each.name for each in folder.iterdir() if _has_data(each))):
        log.warning("%s: only its .bin and .idx files are read; name by itself: %s", source.path, ", ".join(more))
    if not all(stored.has_sums for file in files for stored in file.files):
        log.info("%s: has no checksums of blocks, which `titanlite tokenize` writes: damage is not detected", source.path)
    if manifest is not None:
        fingerprint = manifest["fingerprint"]
    else:
        fingerprint = digest(*(probe(stored.path) for file in files for stored in file.files))
    return TokenSource(source, name_of(source), files, fingerprint, None if manifest is None else folder)


def _has_data(path: Path) -> bool:
    """Whether a file or folder beside token files could be taken for a part of the data: text, or a folder of token files."""
    if path.name.startswith("."):
        return False
    return any(path.glob("*.idx")) if path.is_dir() else path.suffix in (".jsonl", ".parquet")


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
        raise UserError(f"{folder}: made with another tokenizer than that of model.hf_assets_path; name that one there")
    _check_beginning(folder, tuple(manifest["beginning_of_text"]), loaded)
    if manifest["largest_id"] >= vocabulary:
        raise UserError(f"{folder}: has ids up to {manifest['largest_id']}, and the model's vocabulary is {vocabulary}")
    for file, shard in zip(files, manifest["shards"], strict=True):
        for stored in file.files:
            stored.require_sums()
        if (file.documents, file.tokens) != (shard["documents"], shard["tokens"]):
            listed = f"{MANIFEST} says {shard['documents']:,} of {shard['tokens']:,}"
            raise UserError(f"{file.prefix}.bin: has {file.documents:,} documents of {file.tokens:,} tokens; {listed}")
        if shard["loss"] and file.loss is None:
            raise UserError(f"{file.prefix}.loss: is missing; without it the loss would include the user's turns of chats")
    return files, manifest


def _check_beginning(path: Path, beginning: tuple[int, ...], loaded: LoadedTokenizer) -> None:
    """Raises UserError for token files whose texts begin with other ids than those of this run."""
    if beginning != loaded.beginning:
        theirs, ours = loaded.spelled(beginning), loaded.spelled(loaded.beginning)
        remedy = f"set training.add_bos = {json.dumps(bool(beginning))}, or tokenize the text again"
        raise UserError(f"{path}: its texts begin with {theirs}, and those of this run with {ours}; {remedy}")


def _foreign_beginning(file: TokenFile, loaded: LoadedTokenizer) -> tuple[int, ...]:
    """The beginning-of-text ids of another tool's file, by its first document.

    An empty file says nothing, nor one whose documents end with the same id: they count as those of the configuration.
    """
    if not file.tokens or loaded.bos in ((), (loaded.end_of_text,)):
        return loaded.beginning
    begin = int(file.boundaries(0, 1)[0])
    return loaded.bos if tuple(file.ids[begin : begin + len(loaded.bos)].tolist()) == loaded.bos else ()


def probe(path: Path) -> str:
    """A digest of a file's size and of 16 evenly spread blocks: it reads 64 KiB of a terabyte."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        result = xxhash.xxh3_128(str(size).encode())
        for number in range(_PROBES):
            file.seek(max(0, size - _PROBE_BYTES) * number // (_PROBES - 1))
            result.update(file.read(_PROBE_BYTES))
    return result.hexdigest()


def open_tokenizer(assets: str, add_bos: bool | None = None) -> LoadedTokenizer:
    """The tokenizer of `model.hf_assets_path`, or where that is empty the default one, trained at first use.

    add_bos: as training.add_bos; the default tokenizer has no such token.
    """
    return load_tokenizer(assets, add_bos=add_bos) if assets else default_tokenizer()


def tokenizer_of_run(source: Path, numbers: dict[str, Any], assets: str, option: str) -> LoadedTokenizer:
    """The tokenizer with which the run of a checkpoint was trained: the one of `assets`, or the default one.

    numbers: of the checkpoint's manifest. option: of the command, which names another folder. Raises UserError if it is another
    tokenizer: generated texts and scores were wrong without a word.
    """
    if assets and not (Path(assets) / "tokenizer.json").is_file():
        raise UserError(f"{assets}: there is no tokenizer.json in it; name the tokenizer's folder with {option}")
    loaded = open_tokenizer(assets, numbers["config"].get("training", {}).get("add_bos"))
    if numbers["data"].get("tokenizer") not in (None, tokenizer_digest(loaded)):
        which = assets or "the default one of this installation"
        raise UserError(f"{source}: trained with another tokenizer than {which}; name its folder with {option}")
    return loaded


def key_faults(config: Config) -> Iterator[str]:
    """Sources that do not go together, on any machine."""
    for section in sections_of(config):
        try:
            sources_of(config, section)
        except UserError as error:
            yield str(error)


def faults(config: Config) -> Iterator[str]:
    """Keys that do not name data, without `key_faults`. Text is only checked to exist."""
    for section in sections_of(config):
        for path in dict.fromkeys(source.path for source in sources_of(config, section) if not is_part(source.path)):
            try:
                find(path, key_of(config, section))
            except UserError as error:
                yield str(error)


def file_faults(config: Config, vocabulary: int) -> Iterator[str]:
    """Token files that cannot be used with the tokenizer and vocabulary of a configuration without `faults`; text whose first
    document cannot be.
    """
    keys = {source.path: key_of(config, section) for section in sections_of(config) for source in sources_of(config, section)}
    for path, key in keys.items():
        if is_part(path):
            continue
        try:
            if (prefixes := find(path, key)) is not None:
                loaded = open_tokenizer(config.model.hf_assets_path, config.training.add_bos)
                _open_files(prefixes, Path(path), loaded, vocabulary)
            elif fault := first_fault(path, key, config.model.hf_assets_path):
                yield fault
        except UserError as error:
            yield str(error)


def sections_of(config: Config) -> list[str]:
    """The sections that name data."""
    return ["training", *(["validation"] if config.validation.enable else [])]
