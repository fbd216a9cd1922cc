"""The data of a run: its sources mixed by weight, in an order that is a function of the seed and a sample's position.

Nothing here has state. The next samples follow from the number of samples consumed, which is all that a checkpoint keeps.
"""

import bisect
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlite.config.schema import Config, Training
from titanlite.data.order import MIXTURE, drawn, interleave, sample_at
from titanlite.data.samples import Arrays, Rows, fill, rows_of
from titanlite.data.sources import TokenSource, key_of, open_packing, open_source, open_tokenizer, sources_of
from titanlite.data.tokenizer import byte_lengths, digest, tokenizer_digest
from titanlite.errors import UserError, listed
from titanlite.launch import process
from titanlite.transforms.registry import family_of

log = logging.getLogger(__name__)

PADDING, USED_UP = -1, -2  # instead of a sample's number: a row of padding; a sample beyond a source's `epochs`


@dataclass(frozen=True)
class MixtureSource:
    """A source with its rows."""

    source: TokenSource
    rows: list[Rows]  # of each file
    ends: list[int]  # cumulative rows of the files

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        return self.ends[-1]

    @property
    def kept(self) -> int:
        """Tokens in all rows."""
        return sum(rows.tokens for rows in self.rows)

    @property
    def tokens(self) -> int:
        return sum(rows.file.tokens for rows in self.rows)

    @property
    def documents(self) -> int:
        return sum(rows.file.documents for rows in self.rows)

    def locate(self, sample: int) -> tuple[Rows, int]:
        """The rows of the file that holds a sample, and the sample's row there."""
        number = bisect.bisect_right(self.ends, sample)
        rows = self.rows[number]
        return rows, sample - (self.ends[number] - rows.count)


class Data:
    """All sources of [training] or [validation], opened. In another process, it opens only the files that it reads there."""

    def __init__(
        self,
        sources: list[TokenSource],
        training: Training,
        tokenizer: str,
        byte_lengths: np.ndarray,
        vocabulary: int,
        key: str,
    ):
        """tokenizer: its digest. byte_lengths (vocabulary,) int64: bytes of text that each id stands for.

        vocabulary: of the model, an upper bound of the ids. key: names the sources in messages. Raises UserError for a source
        without a single sample, or with a weight that is too small.
        """
        self.sources = [_with_rows(source, training, key) for source in sources]
        self.shares = _shares(self.sources, key)
        self.byte_lengths, self.key = byte_lengths, key
        self.seq_len, self.mask = training.seq_len, training.document_mask
        self._padded = training.document_policy != "pack"
        has_loss = any(file.has_loss for source in sources for file in source.files)
        self._all_counted = not (self.mask or self._padded or has_loss)
        self._foreign = any(source.manifest is None for source in sources)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def describe(self) -> dict[str, Any]:
        """What a checkpoint records of the data, to detect and name changes."""
        sources = [
            {
                "name": mixed.source.name,
                "documents": mixed.documents,
                "tokens": mixed.tokens,
                "fingerprint": mixed.source.fingerprint,
                "share": share / sum(self.shares),
            }
            for mixed, share in zip(self.sources, self.shares, strict=True)
        ]
        return {"tokenizer": self._tokenizer, "sources": sources}

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal samples."""
        parts = (f"{mixed.source.fingerprint} {share}" for mixed, share in zip(self.sources, self.shares, strict=True))
        return digest(self._tokenizer, *parts)

    def derived_values(self, samples: int) -> dict[str, str]:
        """What a run of that many samples reads of each source, for the start of the log: name -> sentence."""
        lines = {}
        for mixed, share, draws in zip(self.sources, self.shares, drawn(samples, self.shares), strict=True):
            padding, unused = self.waste(mixed)
            lines["data" if len(self.sources) == 1 else f"data: {mixed.source.name}"] = (
                f"{mixed.tokens:,} tokens in {mixed.documents:,} documents, {share / sum(self.shares):.1%} of samples, "
                f"{draws / mixed.count:.2f} epochs; {padding:.1%} padding, {unused:.1%} of tokens unused"
            )
        return lines

    def waste(self, mixed: MixtureSource) -> tuple[float, float]:
        """(share of padding in all rows, share of all tokens that are in no row) of a source."""
        return 1 - mixed.kept / (mixed.count * (self.seq_len + self._padded)), max(0.0, 1 - mixed.kept / mixed.tokens)

    def locate(self, positions: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample of it) at each position of the run; positions (n,) int64 -> two (n,) int64.

        A sample beyond the `epochs` of its source is USED_UP, which is an error only when it is read.
        """
        source, index = interleave(positions, self.shares)
        for number, mixed in enumerate(self.sources):
            here = source == number
            drawn_before = index[here]
            index[here] = sample_at(drawn_before, mixed.count, f"{seed}/{number}")
            if (allowed := mixed.source.cfg.epochs) is not None:
                index[here] = np.where(drawn_before < allowed * mixed.count, index[here], USED_UP)
        return source, index

    def read(self, sources: np.ndarray, samples: np.ndarray, note: np.ndarray | None = None) -> Arrays:
        """Samples of some sources, (n,) each, as n rows; a row of PADDING has no labels.

        note: (1,) int64, receives the number of each row before it is read.
        Raises UserError for an id that is not in the vocabulary, and for a sample that is USED_UP.
        """
        numbers = samples.tolist()  # Python numbers and lists: a NumPy call costs as much as copying a short row
        shape = len(numbers), self.seq_len + 1
        arrays = Arrays(
            np.zeros(shape, np.int64),
            None if self._all_counted and PADDING not in numbers else np.zeros(shape, bool),
            np.zeros((len(numbers), self.seq_len), np.int32) if self.mask else None,
        )
        for at, (source, sample) in enumerate(zip(sources.tolist(), numbers, strict=True)):
            if note is not None:
                note[0] = at
            if sample == PADDING:
                continue
            if sample == USED_UP:
                name, allowed = self.sources[source].source.name, self.sources[source].source.cfg.epochs
                raise UserError(f"{self.key}: {name} is used up: {allowed:g} epochs of it are allowed")
            rows, row = self.sources[source].locate(sample)
            fill(arrays, at, rows, row)
        if self._foreign:
            self._check_ids(arrays.tokens, sources, samples)
        return arrays

    def _check_ids(self, tokens: np.ndarray, sources: np.ndarray, samples: np.ndarray) -> None:
        if tokens.min() >= 0 and tokens.max() < self._vocabulary:
            return
        at, place = (int(indices[0]) for indices in np.nonzero((tokens < 0) | (tokens >= self._vocabulary)))
        rows, row = self.sources[sources[at]].locate(int(samples[at]))
        raise UserError(
            f"{rows.file.prefix}.bin: holds the id {tokens[at, place]} in sample {row}, and the model's vocabulary is "
            f"{self._vocabulary}: made with another tokenizer?"
        )


def open_on_every_rank(config: Config) -> tuple[Data, Data | None]:
    """The data of [training] and, where it is enabled, of [validation]; all ranks together, in a process group.

    One rank per node opens, validates and fingerprints the files. The other ranks receive the result, and open only the files
    that they read. Raises UserError as `open_data` does, and where the nodes read different data.
    """

    def open_all() -> tuple[Data, Data | None]:
        return open_data(config), open_data(config, "validation") if config.validation.enable else None

    data, validation = process.once_per_node(open_all)
    if not process.same_everywhere(data.fingerprint + (validation.fingerprint if validation else "")):
        raise UserError("the nodes read different data: give all nodes the same files and Python version")
    if validation is not None and validation.fingerprint == data.fingerprint:
        log.info("validation reads the training text; [validation] dataset_path names another")
    return data, validation


def open_data(config: Config, section: str = "training") -> Data:
    """The data of [training] or [validation]; text is tokenized at first use.

    Raises UserError that names the file and the reason where data or tokenizer cannot be used.
    """
    assets, key = config.model.hf_assets_path, key_of(config, section)
    vocabulary = family_of(config.model).config.vocab_size
    loaded = open_tokenizer(assets)
    sources = [open_source(source, key, loaded, assets, vocabulary) for source in sources_of(config, section)]
    lengths = np.zeros(max(vocabulary, loaded.vocabulary), np.int64)
    lengths[: loaded.vocabulary] = byte_lengths(loaded)
    return Data(sources, config.training, tokenizer_digest(loaded), lengths, vocabulary, key)


def _with_rows(source: TokenSource, training: Training, key: str) -> MixtureSource:
    length, policy = training.seq_len, training.document_policy
    rows = []
    for file in source.files:
        packing = open_packing(file, source.fingerprint, length) if policy == "best_fit" else None
        rows.append(rows_of(file, length, policy, training.document_mask, packing))
    mixed = MixtureSource(source, rows, list(itertools.accumulate(part.count for part in rows)))
    if not mixed.kept:
        raise UserError(f"training.seq_len = {length}: {key}: {source.name} has {mixed.tokens:,} tokens, not one whole sample")
    return mixed


def _shares(sources: list[MixtureSource], key: str) -> list[int]:
    """The share of samples of each source, in parts of MIXTURE, such that its *tokens* have their weight."""
    rates = []
    for mixed in sources:
        weight = mixed.source.cfg.weight
        rates.append(mixed.count if weight is None else weight * mixed.count / mixed.kept)
    shares = [round(rate / sum(rates) * (MIXTURE - len(rates))) for rate in rates]
    if 0 in shares:
        source = sources[shares.index(0)].source
        raise UserError(f"{key}: the weight of {source.name} is below a millionth of all; leave it out or raise it")
    return shares


def check_epochs(data: Data, samples: int) -> None:
    """Raises UserError that names every source that a run of that many samples would read beyond its `epochs`."""
    faults = []
    for mixed, draws in zip(data.sources, drawn(samples, data.shares), strict=True):
        allowed = mixed.source.cfg.epochs
        if allowed is not None and draws > allowed * mixed.count:
            faults.append(
                f"{mixed.source.name}: {draws / mixed.count:.2f} epochs of {mixed.count:,} samples, allowed are {allowed:g}"
            )
    if faults:
        remedy = "Lower training.steps or the weight of these sources, or raise their epochs"
        raise UserError(listed(f"{data.key}: the run would read more epochs than allowed", faults, remedy))
