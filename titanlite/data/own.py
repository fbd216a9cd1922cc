"""Data of the user's own, which a key names as "package.module:name": it makes the rows of a batch in place of token files.

interfaces.py has the protocols: a map, whose sample i is a function of i, and a stream, which continues from a state.
"""

import functools
import inspect
import itertools
import json
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue, TypeAdapter, ValidationError

from titanlite.config.schema import Config, Source
from titanlite.data.order import MAX_POSITION
from titanlite.data.samples import Row
from titanlite.data.sources import name_of, sections_of, sources_of
from titanlite.data.tokenizer import digest
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import bounded
from titanlite.registry.family import family_of
from titanlite.registry.limits import reads_padding
from titanlite.registry.own import calling, fault_of, function_of, is_part, place, with_options

ENDLESS = MAX_POSITION  # samples of a map without __len__, and of a stream
_MOST_TOKENS = 2**53 - 1  # that a checkpoint's numbers hold
_STATE: TypeAdapter[Any] = TypeAdapter(JsonValue)  # names the value that JSON does not hold
_STATES = 32 * 2**20  # characters that the states of all data ranks together take in a checkpoint at most


@dataclass
class OwnSource:
    """A source of the user's own. Each process makes the object at its first read; what is pickled is its name."""

    key: str  # that names it
    cfg: Source
    seq_len: int
    vocabulary: int  # of the model
    full: str = ""  # why a row must be full
    samples: int = ENDLESS
    fingerprint: str = ""  # equal ones mean the same name, options and number of samples; its code is compared by itself
    rows = ()  # of token files, which it has not

    def __post_init__(self) -> None:
        self.name, self.documents = name_of(self.cfg), self.samples
        self.kept = self.samples * self.seq_len  # tokens of an epoch, if all rows are full
        self.tokens = min(self.kept, _MOST_TOKENS)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("part", "_constructor")}

    @functools.cached_property
    def stream(self) -> bool:
        """Whether it is a stream: its constructor takes the rank that it is for."""
        return {"rank", "degree"} <= inspect.signature(self._constructor).parameters.keys()

    @functools.cached_property
    def _constructor(self) -> Any:
        return function_of(self.key, self.cfg.path, classes=True)

    def where(self, sample: int) -> str:
        """The place of a sample, for messages."""
        return f"{self.cfg.path} ({place(self._constructor)}), {self.what(sample)}"

    def what(self, sample: int) -> str:
        return f"item {sample}" if self.stream else f"read({sample})"

    @functools.cached_property
    def part(self) -> Any:
        """The map of this process."""
        return self.make()

    def make(self, **passed: int) -> Any:
        """A new object. passed: rank and degree of a stream. Raises UserError where it cannot be made, or lacks a method."""
        options, taken = self.cfg.options, inspect.signature(self._constructor).parameters
        passed = {name: value for name, value in {"seq_len": self.seq_len, **passed}.items() if name in taken}
        make = with_options(self.key, self.cfg.path, (), {**passed, **options}, classes=True)  # options count more
        with self.failing("cannot be made"):
            part = make()
        needed = ("__iter__", "state_dict", "load_state_dict or reset") if self.stream else ("read",)
        lacking = [name for name in needed if not any(callable(getattr(part, each, None)) for each in name.split(" or "))]
        if lacking:
            kind = "a stream, since it takes rank and degree" if self.stream else "a map; a stream takes rank and degree"
            raise self.fault(f"has no {', '.join(lacking)}; it is {kind}")
        return part

    def opened(self) -> "OwnSource":
        """The source with its number of samples and its fingerprint. Raises UserError."""
        part, samples = self.make(rank=0, degree=1) if self.stream else self.part, ENDLESS
        if not self.stream and hasattr(part, "__len__"):
            with self.failing("len() fails"):
                samples = len(part)
            if not 1 <= samples < ENDLESS:
                raise self.fault(f"has {samples:,} samples; must have 1 or more, fewer than {ENDLESS:,}")
        options = json.dumps(self.cfg.options, sort_keys=True)
        identity = digest("own", self.cfg.path, options, str(samples), str(getattr(part, "fingerprint", "")))
        return replace(self, samples=samples, fingerprint=identity)

    def read(self, sample: int) -> Row:
        """One row of a map. Raises UserError that names the sample and the place in the user's file."""
        with self.failing(f"{self.what(sample)} fails"):
            answer = self.part.read(sample)
        return self.checked(answer, sample)

    def checked(self, answer: Any, sample: int) -> Row:
        """What a map or a stream has returned, as a row. Raises UserError for anything else."""
        what = f"{self.what(sample)} gives"
        with self.failing(f"{what} no valid row"):
            parts = answer if isinstance(answer, tuple) else (answer,)
            ids, loss, ends = (*parts, None, None)[: max(3, len(parts))]
            ids, loss = np.asarray(ids), loss if loss is None else np.asarray(loss)
            ends = [] if ends is None else [operator.index(end) for end in ends]
        least, most = self.seq_len if self.full else 1, self.seq_len + 1
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not least <= len(ids) <= most:
            found = f"{type(answer).__name__} of shape {ids.shape} and dtype {ids.dtype}"
            short = bool(self.full) and ids.ndim == 1 and len(ids) < least
            why = f": {self.full}; return longer rows, or set training.document_mask = true" if short else ""
            raise self.fault(f"{what} ids as {found}; must be {least} to seq_len + 1 = {most} integers{why}")
        if (wrong := (ids < 0) | (ids >= self.vocabulary)).any():
            at = int(wrong.argmax())
            raise self.fault(f"{what} the id {ids[at]} at token {at}, and the model's vocabulary is {self.vocabulary}")
        if loss is not None and (loss.shape != ids.shape or loss.dtype.kind != "b"):
            raise self.fault(f"{what} a loss mask of shape {loss.shape} and dtype {loss.dtype}; must be bool, one for each id")
        edges = [0, *ends, *([len(ids)] if ends[-1:] != [len(ids)] else [])]
        if any(end <= begin for begin, end in itertools.pairwise(edges)):
            raise self.fault(f"{what} ends of documents {ends}; must rise, from 1 to the {len(ids)} ids")
        return Row([(begin, end - begin) for begin, end in itertools.pairwise(edges)], ids, loss)

    def probe(self) -> str:
        """A digest of the first and another sample of a map. Raises UserError."""
        return digest(*(_digest(self.read(sample)) for sample in (0, 1 if self.samples == ENDLESS else self.samples - 1)))

    def fault(self, what: str) -> UserError:
        """An error that names key, part, file and line."""
        return fault_of(self.key, self.cfg.path, what)

    def failing(self, what: str) -> AbstractContextManager[None]:
        """Around the user's code, which can raise anything: raises UserError that names key, part, file and line."""
        return calling(f'{self.key} = "{self.cfg.path}": {what}', self._constructor)


class OpenStream:
    """A stream that is being read."""

    def __init__(self, source: OwnSource, rank: int, degree: int, count: torch.Tensor, state: Any = None):
        """count: (1,) int64, the rows read so far. state: to continue from; None: its beginning. Raises UserError."""
        self._source, self._count, self._most = source, count, _STATES // degree
        self._part = source.make(rank=rank, degree=degree)
        if state is not None:
            with source.failing("cannot continue from its state"):
                (getattr(self._part, "load_state_dict", None) or self._part.reset)(state)  # a node of torchdata has the latter
        with source.failing("cannot be iterated"):
            self._rows = iter(self._part)

    def next(self) -> Row:
        """The next row. Raises UserError, also where the stream ends."""
        number = int(self._count)
        with self._source.failing(f"{self._source.what(number)} fails"):
            answer = next(self._rows, self)
        if answer is self:
            raise self._source.fault(f"ends after {number} rows of this start; must last until training.steps, has no epochs")
        self._count += 1
        return self._source.checked(answer, number)

    def state(self) -> str:
        """Its state after the last row, as JSON. Raises UserError that names what JSON does not hold as it is."""
        with self._source.failing("state_dict() fails"):
            state = self._part.state_dict()
        try:
            text = json.dumps(bounded(_STATE.validate_python(state, strict=True)), allow_nan=False)
        except ValidationError as error:
            first = error.errors()[0]
            at = "".join(f"[{name!r}]" for name in first["loc"][1::2])  # between the names of types
            held = "a checkpoint holds numbers, texts, None, lists, and dicts with texts as keys"
            raise self._source.fault(f"state_dict(){at} is {first['input']!r:.80}; {held}") from None
        except ValueError as error:
            raise self._source.fault(f"state_dict(): {error}") from None
        if len(text) > self._most:
            size = f"state_dict() has {len(text):,} characters"
            raise self._source.fault(f"{size}; a checkpoint holds {self._most:,} a data rank")
        return text


def open_own(config: Config, section: str, number: int, vocabulary: int) -> OwnSource:
    """The source of the user's own that is entry `number` of a section's sources. Raises UserError."""
    sources = sources_of(config, section)
    cfg, several = sources[number], getattr(config, section).sources
    key = f"{section}.sources, entry {number + 1}: path" if several else f"{section}.dataset"
    full = reads_padding(config, family_of(config.model).limits)
    own = OwnSource(key, cfg, config.training.seq_len, vocabulary, full).opened()
    if own.stream and (section == "validation" or len(sources) > 1):
        why = "validation reads the same samples each time" if section == "validation" else "a mixture counts samples"
        raise own.fault(f"is a stream, whose samples have no numbers, and {why}; give a map, or the stream alone")
    if own.samples == ENDLESS and cfg.epochs is not None:
        raise own.fault("has no epochs: it has no __len__; remove epochs")
    if own.samples == ENDLESS and len(sources) > 1 and section == "training" and cfg.weight is None:
        raise own.fault("has no size: it has no __len__; give every source a weight")
    if own.samples == ENDLESS and section == "validation" and config.validation.steps == -1:
        raise own.fault("validation.steps = -1: it has no end: it has no __len__; give a number of steps")
    if config.training.document_policy != "pack" and all(
        is_part(each.path) for name in sections_of(config) for each in sources_of(config, name)
    ):
        policy = config.training.document_policy
        raise own.fault(f'training.document_policy = "{policy}": has no effect: it makes whole rows; remove the key')
    return own


def faults(config: Config, vocabulary: int) -> Iterator[str]:
    """Data of the user's own that fails, makes no rows, or is not the same when it is read again."""
    for section in sections_of(config):
        for number, source in enumerate(sources_of(config, section)):
            if not is_part(source.path):
                continue
            try:
                own = open_own(config, section, number, vocabulary)
                check_repeats(own)
            except UserError as error:
                yield from str(error).splitlines()


def _digest(row: Row) -> str:
    """Equal for equal rows."""
    labels = None if row.loss is None else [*row.loss[:]]
    return digest(str(row.pieces), str(row.ids[:].tolist()), str(labels))


def check_repeats(own: OwnSource) -> None:
    """Raises UserError for a map of which another object reads other samples, or a stream that does not resume."""
    if own.stream:
        _check_resumes(own)
    elif own.probe() != replace(own).probe():
        raise own.fault("read(0) or the last sample differs from object to object; must be a function of i: seed generators")


def _check_resumes(own: OwnSource) -> None:
    """Raises UserError for a stream that gives other rows after its state was loaded than without interruption."""
    whole, parts = (OpenStream(own, 0, 1, torch.zeros(1, dtype=torch.int64)) for _ in range(2))
    whole.next()
    parts.next()
    after = OpenStream(own, 0, 1, torch.ones(1, dtype=torch.int64), json.loads(parts.state()))
    if [_digest(whole.next()) for _ in range(2)] != [_digest(after.next()) for _ in range(2)]:
        why = "state_dict() must hold the position after the last row (advance before yield), and generators be seeded"
        raise own.fault(f"continues from its state with other rows than without interruption: {why}")
