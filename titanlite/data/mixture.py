"""The data of a run: its sources mixed by weight, in an order that is a function of the seed and a sample's position.

Nothing here has state. Which samples a step has follows from the timeline of the run, which is all that a checkpoint keeps.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.effects import Hardware
from titanlite.config.schema import Config, Training
from titanlite.data import timeline
from titanlite.data.order import MIXTURE, interleave, permute, sample_at
from titanlite.data.own import ENDLESS, OwnSource, open_own
from titanlite.data.samples import NOTHING, Arrays, fill
from titanlite.data.sources import TokenSource, key_of, open_source, open_tokenizer, sources_of
from titanlite.data.timeline import Mixture, Segment, Timeline
from titanlite.data.tokenizer import byte_lengths, digest, tokenizer_digest
from titanlite.ground.errors import UserError, listed, phase
from titanlite.launch import process
from titanlite.registry.own import is_part

log = logging.getLogger(__name__)

_SEARCHED_AT_ONCE = 2**20  # tokens that are read together, to find a label
PADDING = -1  # instead of a sample's number: a row of padding


class Data:
    """All sources of [training] or [validation], opened. In another process, it opens only the files that it reads there."""

    def __init__(
        self,
        sources: Sequence[TokenSource | OwnSource],
        training: Training,
        tokenizer: str,
        byte_lengths: np.ndarray,
        key: str,
        prefix: str = "no BOS",
    ):
        """tokenizer: its digest. byte_lengths (vocabulary of the model,) int64: bytes of text that each id stands for.

        key: names the sources in messages. prefix: the special tokens that begin every text, spelled. Raises UserError for a
        source without a single sample.
        """
        self.sources = [each if isinstance(each, OwnSource) else each.with_rows(training, key) for each in sources]
        self.shares = _shares(self.sources)
        self.byte_lengths, self.key, self.prefix = byte_lengths, key, prefix
        self.seq_len, self.mask = training.seq_len, training.document_mask
        self._padded = training.document_policy != "pack"
        has_loss = any(rows.file.loss is not None for source in self.sources for rows in source.rows)
        own = any(isinstance(source, OwnSource) for source in sources)  # whose rows may be short, or have a mask
        self._all_counted = not (self.mask or self._padded or has_loss or own)
        self._tokenizer, self._vocabulary = tokenizer, len(byte_lengths)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint records of the data, to detect and name changes."""
        sources = [
            {
                "name": source.name,
                "documents": source.documents,
                "tokens": source.tokens,
                "fingerprint": source.fingerprint,
                "share": share / sum(self.shares),
            }
            for source, share in zip(self.sources, self.shares, strict=True)
        ]
        return {"tokenizer": self._tokenizer, "beginning": self.prefix, "sources": sources}

    @property
    def stream(self) -> OwnSource | None:
        """The stream that this data is; None where it has numbered samples."""
        (source, *_) = self.sources
        return source if isinstance(source, OwnSource) and source.stream else None

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal samples."""
        parts = (f"{source.fingerprint} {share}" for source, share in zip(self.sources, self.shares, strict=True))
        return digest(self._tokenizer, *parts)

    @property
    def mixture(self) -> Mixture:
        """What a timeline records of the sources."""
        return [(source.fingerprint, share) for source, share in zip(self.sources, self.shares, strict=True)]

    def timeline(self, global_batch: int) -> Timeline:
        """The timeline of a run that begins with these sources."""
        return timeline.begin(global_batch, self.mixture)

    def derived_values(self, run: Timeline, steps: int) -> dict[str, str]:
        """What a run of this many steps reads of each source, for the start of the log: name -> sentence."""
        lines = {"texts begin with": self.prefix}
        segment, end = run.at(steps + 1)
        for source, share, draws in zip(self.sources, self.shares, segment.drawn(end), strict=False):
            title = "data" if len(self.sources) == 1 else f"data: {source.name}"
            if isinstance(source, OwnSource):
                part = f"{share / sum(self.shares):.1%} of samples"
                lines[title] = f"{source.cfg.path}, {part}: {draws:,}, {draws / source.samples:.2f} epochs"
                continue
            padding, unused = self.waste(source)
            lines[title] = (
                f"{source.tokens:,} tokens in {source.documents:,} documents, {share / sum(self.shares):.1%} of samples, "
                f"{draws / source.samples:.2f} epochs; {padding:.1%} padding, {unused:.1%} of tokens unused"
            )
        return lines

    def waste(self, source: TokenSource | OwnSource) -> tuple[float, float]:
        """(share of padding in all rows, share of all tokens that are in no row) of a source."""
        return 1 - source.kept / (source.samples * (self.seq_len + self._padded)), max(0.0, 1 - source.kept / source.tokens)

    def locate(self, positions: np.ndarray, seed: int, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample of it) at each position of a segment of the run; positions (n,) int64 -> two (n,) int64."""
        numbers, index = interleave(positions - segment.began, self.shares)
        for number, (source, before) in enumerate(zip(self.sources, segment.sources, strict=False)):
            here, endless = numbers == number, source.samples == ENDLESS
            drawn = before.drawn + index[here]
            index[here] = drawn if endless else sample_at(drawn, source.samples, f"{seed}/{before.order}")
        return numbers, index

    def read(self, sources: np.ndarray, samples: np.ndarray, note: np.ndarray | None = None) -> Arrays:
        """Samples of some sources, (n,) each, as n rows; a row of PADDING has no labels.

        note: (1,) int64, receives the number of each row before it is read.
        Raises UserError for an id that is not in the vocabulary, and for a damaged or truncated file.
        """
        numbers = samples.tolist()  # Python numbers and lists: a NumPy call costs as much as copying a short row
        shape = len(numbers), self.seq_len + 1
        arrays = Arrays(  # not cleared, since `fill` writes all of a row: that took as long as the check of the ids
            np.empty(shape, np.int64),
            None if self._all_counted and PADDING not in numbers else np.empty(shape, bool),
            np.empty((len(numbers), self.seq_len), np.int32) if self.mask else None,
        )
        for at, (source, sample) in enumerate(zip(sources.tolist(), numbers, strict=True)):
            if note is not None:
                note[0] = at
            fill(arrays, at, NOTHING if sample == PADDING else self.sources[source].read(sample))
        if arrays.tokens.view(np.uint64).max() >= self._vocabulary:  # as unsigned numbers, negative ids are the largest
            self._refuse_ids(arrays.tokens, sources, samples)
        return arrays

    def has_labels(self, source: int) -> bool:
        """Whether any sample of a source has a label. Reads samples in a random order until one has: of most sources, one."""
        count, first, size = self.sources[source].samples, 0, 1
        count = min(count, _SEARCHED_AT_ONCE // self.seq_len + 1) if isinstance(self.sources[source], OwnSource) else count
        while not self._all_counted and first < count:
            samples = permute(np.arange(first, min(first + size, count)), count, "labels")
            counted = self.read(np.full(len(samples), source), samples).counted
            if counted is not None and counted[:, 1:].any():
                return True
            first, size = first + size, min(2 * size, max(1, _SEARCHED_AT_ONCE // self.seq_len))
        return self._all_counted

    def _refuse_ids(self, tokens: np.ndarray, sources: np.ndarray, samples: np.ndarray) -> None:
        """Raises UserError for the first id that is not in the vocabulary."""
        at, position = (int(indices[0]) for indices in np.nonzero((tokens < 0) | (tokens >= self._vocabulary)))
        where = self.sources[sources[at]].where(int(samples[at]))
        raise UserError(
            f"{where}: holds the id {tokens[at, position]}, and the model's vocabulary is {self._vocabulary}: made with "
            "another tokenizer?"
        )


def open_on_every_rank(config: Config, vocabulary: int) -> tuple[Data, Data | None]:
    """The data of [training] and, where it is enabled, of [validation]; all ranks together, in a process group.

    One rank per node opens, validates and fingerprints the files. The other ranks receive the result, and open only the files
    that they read. Raises UserError as `open_data` does, and where the nodes read different data.
    """

    def open_all() -> tuple[Data, Data | None]:
        return open_data(config, vocabulary), open_data(config, vocabulary, "validation") if config.validation.enable else None

    data, validation = process.once_per_node(open_all)
    everything = [*data.sources, *(validation.sources if validation else ())]
    prepared = config.training.document_policy == "best_fit" or any(map(_is_text, everything))
    with process.after_other_nodes(config.comm) if prepared else contextlib.nullcontext():
        same = process.same_everywhere(data.fingerprint + (validation.fingerprint if validation else ""))
    for source in everything:
        if isinstance(source, OwnSource) and not source.stream:
            with process.together():
                first = source.probe()
            if not process.same_everywhere(first):
                raise source.fault("read(0) or the last sample differs between ranks; must be the same on all of them")
    if not same:
        raise UserError("the nodes read different data: give all nodes the same files and Python version")
    if validation is not None and validation.fingerprint == data.fingerprint:
        log.info("validation reads the training text; [validation] dataset_path names another")
    return data, validation


@phase("opening the data")
def open_data(config: Config, vocabulary: int, section: str = "training") -> Data:
    """The data of [training] or [validation]; text is tokenized at first use. vocabulary: of the model.

    Raises UserError that names the file and the reason where data or tokenizer cannot be used.
    """
    config = config.settled(Hardware())  # a key without effect may be in a file, and must have none here
    assets, key = config.model.hf_assets_path, key_of(config, section)
    loaded = open_tokenizer(assets, config.training.add_bos)
    sources = [
        open_own(config, section, number, vocabulary)
        if is_part(source.path)
        else open_source(source, key, loaded, assets, vocabulary)
        for number, source in enumerate(sources_of(config, section))
    ]
    lengths = np.pad(byte_lengths(loaded), (0, vocabulary))[:vocabulary]
    data = Data(sources, config.training, tokenizer_digest(loaded), lengths, key, loaded.spelled(loaded.beginning))
    check_labels(data)
    return data


def _is_text(source: TokenSource | OwnSource) -> bool:
    """Whether a node tokenizes a source, or has done so at an earlier start."""
    return isinstance(source, TokenSource) and source.folder not in (None, Path(source.cfg.path))


def _shares(sources: Sequence[TokenSource | OwnSource]) -> list[int]:
    """The share of samples of each source, integers of a sum up to MIXTURE, such that its *tokens* have their weight.

    The smallest is a millionth of all.
    """
    rates = []
    for source in sources:
        weight = source.cfg.weight
        rates.append(source.samples if weight is None else weight * source.samples / source.kept)
    shares = [max(1, round(rate / sum(rates) * (MIXTURE - len(rates)))) for rate in rates]
    return [share // math.gcd(*shares) for share in shares]


def check_labels(data: Data) -> None:
    """Raises UserError that names every source that has nothing to learn: training on it would report losses of 0."""
    faults = [
        f"{source.name}: {source.documents:,} documents of {source.tokens:,} tokens, {source.samples:,} samples"
        for number, source in enumerate(data.sources)
        if data.stream is None and not data.has_labels(number)
    ]
    if faults:
        remedy = "Its documents are empty, or its assistant never says anything: leave it out, or correct the text"
        raise UserError(listed(f"{data.key}: sources without a single token to predict", faults, remedy))


def check_epochs(data: Data, run: Timeline, steps: int) -> None:
    """Raises UserError that names every source that a run of this many steps would read beyond its `epochs`.

    Samples that replace those of rollbacks do not count; the log names them where they are of another epoch.
    """
    faults = []
    segment, end = run.at(steps + 1)
    for source, draws, read in zip(data.sources, segment.drawn(end), segment.read(end), strict=False):
        name, allowed = source.name, source.cfg.epochs
        if allowed is None or draws <= allowed * source.samples:
            continue
        if read > allowed * source.samples:
            faults.append(f"{name}: {read / source.samples:.2f} epochs of {source.samples:,} samples, allowed are {allowed:g}")
        else:
            more = draws - math.floor(allowed * source.samples)
            log.info("%s: reads %d samples beyond its %g epochs, instead of those that rollbacks left out", name, more, allowed)
    if faults:
        remedy = "Lower training.steps or the weight of these sources, or raise their epochs"
        raise UserError(listed(f"{data.key}: the run would read more epochs than allowed", faults, remedy))
