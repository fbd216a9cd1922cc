"""The data of a run: its sources mixed by weight, in an order that is a function of the seed and the number of a sample.

Nothing here has a state. Which samples are next follows from how many were used: the one number that a checkpoint keeps.
"""

import bisect
import itertools
from typing import Any, NamedTuple

import numpy as np

from titanlite.config.schema import Config, Training
from titanlite.data.cache import digest
from titanlite.data.order import MIXTURE, drawn, interleave, sample_at
from titanlite.data.samples import Arrays, Rows, fill, rows_of
from titanlite.data.sources import Opened, key_of, open_packing, open_source, open_tokenizer, sources_of
from titanlite.data.tokenizer import byte_lengths, tokenizer_digest
from titanlite.errors import UserError
from titanlite.transforms.registry import family_of

PADDING, USED_UP = -1, -2  # in place of a sample's number: a row of padding, and more than a source's `epochs` allow


class Mixed(NamedTuple):
    """A source with its rows counted."""

    source: Opened
    rows: list[Rows]  # of each file
    ends: list[int]  # rows of the files up to each one, it included
    share: int  # of the mixture, in parts of MIXTURE

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        return self.ends[-1]

    @property
    def tokens(self) -> int:
        return sum(rows.file.tokens for rows in self.rows)

    @property
    def documents(self) -> int:
        return sum(rows.file.documents for rows in self.rows)

    def waste(self, width: int) -> tuple[float, float]:
        """(part of all places in rows of `width` tokens that is padding, part of all tokens that stands in no row)."""
        kept = sum(rows.tokens for rows in self.rows)
        return 1 - kept / (self.count * width), max(0.0, 1 - kept / self.tokens)

    def locate(self, sample: int) -> tuple[Rows, int]:
        """The file of a sample, and its row there."""
        number = bisect.bisect_right(self.ends, sample)
        rows = self.rows[number]
        return rows, sample - (self.ends[number] - rows.count)


class Data:
    """All sources of [training] or [validation], opened. It travels to other processes, which map the files anew."""

    def __init__(
        self, mixed: list[Mixed], training: Training, tokenizer: str, byte_lengths: np.ndarray, vocabulary: int, key: str
    ):
        """tokenizer: its digest. byte_lengths (vocabulary,) int64: bytes of text that each id stands for. See `mix`."""
        self.sources, self.byte_lengths, self.key = mixed, byte_lengths, key
        self.seq_len, self.mask = training.seq_len, training.document_mask
        self._padded = training.document_policy != "pack"
        self._some_uncounted = (
            self.mask or self._padded or any(rows.file.loss is not None for source in mixed for rows in source.rows)
        )
        self._unchecked = any(source.source.manifest is None for source in mixed)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._shares = sum(source.share for source in mixed)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data, to tell whether it has changed, and how."""
        sources = [
            {
                "name": mixed.source.name,
                "documents": mixed.documents,
                "tokens": mixed.tokens,
                "fingerprint": mixed.source.fingerprint,
                "share": mixed.share / self._shares,
            }
            for mixed in self.sources
        ]
        return {"tokenizer": self._tokenizer, "sources": sources}

    @property
    def fingerprint(self) -> str:
        """Equal where samples are equal."""
        return digest(self._tokenizer, *(f"{mixed.source.fingerprint} {mixed.share}" for mixed in self.sources))

    def derived_values(self, samples: int) -> dict[str, str]:
        """What a run of so many samples does with each source, for the start of the log: name -> sentence."""
        lines = {}
        for mixed, draws in zip(self.sources, self.draws(samples), strict=True):
            padding, unused = self.waste(mixed)
            lines["data" if len(self.sources) == 1 else f"data: {mixed.source.name}"] = (
                f"{mixed.tokens:,} tokens in {mixed.documents:,} documents, {mixed.share / self._shares:.1%} of samples, "
                f"{draws / mixed.count:.2f} epochs; {padding:.1%} padding, {unused:.1%} of tokens unused"
            )
        return lines

    def waste(self, mixed: Mixed) -> tuple[float, float]:
        """(part of all places in rows that is padding, part of all tokens that stands in no row) of a source."""
        return mixed.waste(self.seq_len + self._padded)

    def draws(self, samples: int) -> list[int]:
        """How many of a run's first `samples` samples come from each source."""
        return drawn(samples, [mixed.share for mixed in self.sources])

    def locate(self, positions: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample of it) at each position of the run; positions (n,) int64 -> two (n,) int64.

        A sample is USED_UP where its source would be read more often than its `epochs` allow: no fault until it is read.
        """
        source, index = interleave(positions, [mixed.share for mixed in self.sources])
        for number, mixed in enumerate(self.sources):
            here = source == number
            drawn_before = index[here]
            index[here] = sample_at(drawn_before, mixed.count, f"{seed}/{number}")
            if (allowed := mixed.source.keys.epochs) is not None:
                index[here] = np.where(drawn_before < allowed * mixed.count, index[here], USED_UP)
        return source, index

    def read(self, sources: np.ndarray, samples: np.ndarray, note: np.ndarray | None = None) -> Arrays:
        """The samples of some sources, (n,) each, as n rows; of a row of PADDING no label counts.

        note: (1,) int64, into which the number of each row is written before it is read.
        Raises UserError for an id that is not in the vocabulary, and for a sample that is USED_UP.
        """
        length = self.seq_len
        numbers = samples.tolist()  # plain numbers and lists: a call of NumPy costs as much as copying a short row
        arrays = self._empty(len(samples), with_counted=self._some_uncounted or PADDING in numbers)
        for at, (source, sample) in enumerate(zip(sources.tolist(), numbers, strict=True)):
            if note is not None:
                note[0] = at
            if sample == PADDING:
                continue
            if sample == USED_UP:
                name, allowed = self.sources[source].source.name, self.sources[source].source.keys.epochs
                raise UserError(f"{self.key}: {name} is used up: {allowed:g} epochs of it are allowed")
            rows, row = self.sources[source].locate(sample)
            if arrays.counted is None:  # one piece a row, and nothing to be said of it
                arrays.tokens[at] = rows.file.ids[row * length : row * length + length + 1]
            else:
                fill(arrays, at, rows, row, length)
        if self._unchecked:
            self._check_ids(arrays.tokens, sources, samples)
        return arrays

    def _empty(self, rows: int, with_counted: bool) -> Arrays:
        """Rows of padding, or where all of every row counts, rows of anything."""
        shape = rows, self.seq_len + 1
        if not with_counted:
            return Arrays(np.empty(shape, np.int64), None, None)
        documents = np.zeros((rows, self.seq_len), np.int32) if self.mask else None
        return Arrays(np.zeros(shape, np.int64), np.zeros(shape, bool), documents)

    def _check_ids(self, tokens: np.ndarray, sources: np.ndarray, samples: np.ndarray) -> None:
        if tokens.min() >= 0 and tokens.max() < self._vocabulary:
            return
        at, place = (int(found[0]) for found in np.nonzero((tokens < 0) | (tokens >= self._vocabulary)))
        rows, row = self.sources[sources[at]].locate(int(samples[at]))
        raise UserError(
            f"{rows.file.prefix}.bin: holds the id {tokens[at, place]} in sample {row}, and the model's vocabulary is "
            f"{self._vocabulary}: made for another tokenizer?"
        )


def open_data(config: Config, section: str = "training") -> Data:
    """The data of [training] or [validation], made now where it is text that was not used before.

    Raises UserError for data or a tokenizer that cannot be used, with file and reason.
    """
    assets, key = config.model.hf_assets_path, key_of(config, section)
    vocabulary = family_of(config.model).config.vocab_size
    loaded = open_tokenizer(assets)
    opened = [open_source(source, key, loaded, assets, vocabulary) for source in sources_of(config, section)]
    lengths = np.zeros(max(vocabulary, loaded.vocabulary), np.int64)
    lengths[: loaded.vocabulary] = byte_lengths(loaded)
    return mix(opened, config.training, tokenizer_digest(loaded), lengths, vocabulary, key)


def mix(opened: list[Opened], training: Training, tokenizer: str, byte_lengths: np.ndarray, vocabulary: int, key: str) -> Data:
    """Opened sources as one. vocabulary: of the model, which ids of foreign files must be below. key: for messages.

    Raises UserError for a source without a single sample.
    """
    length, policy = training.seq_len, training.document_policy
    counted: list[tuple[Opened, list[Rows]]] = []
    for source in opened:
        rows = []
        for file in source.files:
            packing = open_packing(file, source.fingerprint, length) if policy == "best_fit" else None
            rows.append(rows_of(file, policy, length, training.document_mask, packing))
        if not sum(part.tokens for part in rows):
            tokens = sum(file.tokens for file in source.files)
            raise UserError(f"training.seq_len = {length}: {key}: {source.name} has {tokens:,} tokens, not one whole sample")
        counted.append((source, rows))
    mixed = [
        Mixed(source, rows, list(itertools.accumulate(part.count for part in rows)), share)
        for (source, rows), share in zip(counted, _shares(counted, key), strict=True)
    ]
    return Data(mixed, training, tokenizer, byte_lengths, vocabulary, key)


def _shares(counted: list[tuple[Opened, list[Rows]]], key: str) -> list[int]:
    """Of all samples, the part that each source gives, in parts of MIXTURE: such that its *tokens* have their weight."""
    rates = []
    for source, rows in counted:
        samples, tokens = sum(part.count for part in rows), sum(part.tokens for part in rows)
        weight = source.keys.weight
        rates.append(samples if weight is None else weight * samples / tokens)
    shares = [round(rate / sum(rates) * (MIXTURE - len(rates))) for rate in rates]
    if 0 in shares:
        source = counted[shares.index(0)][0]
        raise UserError(f"{key}: the weight of {source.name} is below a millionth of all; leave it out or raise it")
    return shares


def check_epochs(data: Data, samples: int) -> None:
    """Raises UserError for every source that a run of so many samples would read more often than its `epochs` allow."""
    faults = []
    for mixed, draws in zip(data.sources, data.draws(samples), strict=True):
        allowed = mixed.source.keys.epochs
        if allowed is not None and draws > allowed * mixed.count:
            faults.append(
                f"  {mixed.source.name}: {draws / mixed.count:.2f} epochs of {mixed.count:,} samples, allowed are {allowed:g}"
            )
    if faults:
        raise UserError(
            "\n".join([f"{data.key}: the run would read more often than is allowed", *faults])
            + "\nLower training.steps or the weight of these sources, or raise their epochs"
        )
