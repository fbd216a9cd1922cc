"""Tokenizes units of work, in this process or in workers; a unit becomes a folder that appears by one rename."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict
from tokenizers import Tokenizer

from titanlite.data.prepare.readers import Bad, BadDocument, Document, Part, describe_place, read, where
from titanlite.data.prepare.shards import TokenWriter
from titanlite.errors import UserError
from titanlite.files import sync, sync_contents
from titanlite.launch import children
from titanlite.outside import MIB, Contents, Count, read_json

if TYPE_CHECKING:
    from titanlite.data.prepare.chat import ChatTemplate

KEPT = "finished units are kept: the same command continues from them"
_BATCH = 2**21  # characters that are encoded at once
_LIMIT = 1024 * MIB  # of a record: as many skipped entries as lines
_BATCH_DOCUMENTS = 8192  # the limit of documents in such a batch


class Job(NamedTuple):
    """The parameters that all units share."""

    folder: Path  # of the finished units
    tokenizer: str  # as JSON
    beginning: list[int]  # of each document; a chat whose template writes it gets no second one
    end_of_text: int | None  # appended to each text
    dtype: str  # of the ids, a NumPy type
    text_key: str
    skip: bool  # entries that are not documents; False: raise
    chat: "ChatTemplate | None"


class Unit(NamedTuple):
    name: str
    parts: list[Part]


class Skipped(Contents):
    """An entry of record.json and of skipped.jsonl."""

    file: str
    line: Count | None
    reason: str


class _Stored(Contents):
    """What record.json must hold."""

    model_config = ConfigDict(extra="forbid")

    documents: list[Count]
    tokens: list[Count]
    chats: bool
    skipped: list[Skipped]


class Record(NamedTuple):
    """The contents of a finished unit: its record.json, beside tokens.bin, tokens.idx and, with chats, tokens.loss."""

    documents: list[int]  # of each part
    tokens: list[int]
    chats: bool
    skipped: list[dict[str, Any]]


def open_record(folder: Path) -> Record:
    """The record in the folder of a finished unit."""
    return Record(**read_json(folder / "record.json", _Stored, _LIMIT))


def encode_all(job: Job, units: list[Unit], workers: int) -> Iterator[tuple[Unit, Record]]:
    """Tokenizes units, and yields each when it is finished; with several workers in any order.

    One worker is this process, with the tokenizer's threads. Raises UserError for a unit that fails (BadDocument for its
    contents), and for a worker that was killed.
    """
    # a daemonic process of multiprocessing, such as another library's worker, cannot have children
    if min(workers, len(units)) <= 1 or multiprocessing.current_process().daemon:
        tokenizer = _tokenizer(job)
        for unit in units:
            yield unit, _finish(job, tokenizer, unit)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[connection.Connection, Any] = {}
    queue = iter(units)
    try:
        with children.starting({signal.SIGINT}):
            for _ in range(min(workers, len(units))):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(job, theirs), daemon=True)
                process.start()
                theirs.close()  # so that reading from the pipe ends when the worker ends
                processes[ours] = process
                ours.send(next(queue))
        yield from _gather(list(processes), queue)
    except (EOFError, ConnectionError):
        connection.wait([process.sentinel for process in processes.values()], timeout=1.0)
        codes = [process.exitcode for process in processes.values() if process.exitcode]
        how = f" by signal {-codes[0]}" if codes and codes[0] < 0 else f" with exit code {codes[0]}" if codes else ""
        raise UserError(
            f"a tokenizer worker has ended{how}, perhaps because memory ran out; fewer workers need less; {KEPT}"
        ) from None
    finally:
        for process in processes.values():  # the units that they have finished are on the disk
            process.kill()
            process.join()


def _gather(pipes: list[connection.Connection], queue: Iterator[Unit]) -> Iterator[tuple[Unit, Record]]:
    while pipes:
        for pipe in connection.wait(pipes):
            assert isinstance(pipe, connection.Connection)
            answer = pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            following = next(queue, None)
            if following is None:
                pipes.remove(pipe)
            else:
                pipe.send(following)
            yield answer


def _work(job: Job, pipe: connection.Connection) -> None:
    """A worker: answers each unit with (unit, record) or with an exception."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    children.end_with_parent(parent.pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    tokenizer = _tokenizer(job)
    with contextlib.suppress(EOFError, ConnectionError):  # the command has ended
        while True:
            unit = pipe.recv()
            try:
                answer: Any = unit, _finish(job, tokenizer, unit)
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            pipe.send(answer)


def _tokenizer(job: Job) -> Tokenizer:
    tokenizer = Tokenizer.from_str(job.tokenizer)
    tokenizer.encode_special_tokens = True  # as `describe` sets it, which is not part of the JSON
    return tokenizer


def _finish(job: Job, tokenizer: Tokenizer, unit: Unit) -> Record:
    """Writes a unit's folder under a temporary name, and renames it when all of it is on the disk."""
    unfinished = job.folder / f"{unit.name}.{os.getpid()}.tmp"
    try:
        unfinished.mkdir()
        record = _Encoder(job, tokenizer, unit, unfinished).run()
        (unfinished / "record.json").write_text(json.dumps(record._asdict()), encoding="utf-8")
        sync_contents(unfinished)
        # A worker of a command that was just killed may have finished this unit meanwhile; its folder has the same contents.
        if not (job.folder / unit.name).exists():
            unfinished.rename(job.folder / unit.name)
        sync(job.folder)
    except OSError as error:
        raise UserError(f"{error.filename or unfinished}: cannot be written: {error.strerror}; {KEPT}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return record


class _Encoder:
    """Encodes the documents of a unit, in order, into its token file."""

    def __init__(self, job: Job, tokenizer: Tokenizer, unit: Unit, folder: Path):
        self.job, self.tokenizer, self.parts = job, tokenizer, unit.parts
        # only at the end it is known whether the unit holds a chat
        self.writer = TokenWriter(folder / "tokens", np.dtype(job.dtype), losses=job.chat is not None)
        self.record = Record([0] * len(unit.parts), [0] * len(unit.parts), False, [])
        self.waiting: list[tuple[int, Document | Bad]] = []  # (number of the part, entry)

    def run(self) -> Record:
        characters = 0
        for number, part in enumerate(self.parts):
            for entry in read(part, self.job.text_key):
                self.waiting.append((number, entry))
                characters += len(entry.content) if isinstance(entry, Document) else 0
                if characters >= _BATCH or len(self.waiting) >= _BATCH_DOCUMENTS:
                    self._encode()
                    characters = 0
        self._encode()
        self.writer.close()
        if not self.record.chats:
            self.writer.prefix.with_name("tokens.loss").unlink(missing_ok=True)
        return self.record

    def _encode(self) -> None:
        texts = [entry.content for _, entry in self.waiting if isinstance(entry, Document) and isinstance(entry.content, str)]
        encoded = iter(self._encode_texts(texts))
        for number, entry in self.waiting:
            if isinstance(entry, Bad):
                self._refuse(number, entry)
            elif isinstance(entry.content, str):
                ids = next(encoded)
                if isinstance(ids, str):
                    self._refuse(number, Bad(entry.place, ids))
                    continue
                end = [] if self.job.end_of_text is None else [self.job.end_of_text]
                self._add(number, [*self.job.beginning, *ids, *end], None)
            else:
                self._encode_chat(number, entry)
        self.waiting.clear()

    def _encode_texts(self, texts: list[str]) -> Iterator[list[int] | str]:
        """The ids of each text, or the reason why it cannot be encoded."""
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # the library raises no other class, and does not say which text failed
            for text in texts:
                try:
                    yield self.tokenizer.encode(text, add_special_tokens=False).ids
                except Exception as error:
                    yield f"the tokenizer cannot encode it: {error}"
        else:
            yield from (encoding.ids for encoding in encodings)

    def _encode_chat(self, number: int, entry: Document) -> None:
        if self.job.chat is None:
            self._refuse(number, Bad(entry.place, "a chat, but the tokenizer's folder has no chat template"))
            return
        assert isinstance(entry.content, list)
        try:
            ids, loss = self.job.chat.encode(entry.content, entry.tools)
        except (ValueError, TypeError) as error:  # TypeError: the tokenizer's for text that is not Unicode
            self._refuse(number, Bad(entry.place, f"a chat that cannot be rendered: {error}"))
            return
        self.record = self.record._replace(chats=True)
        beginning = [] if ids[: len(self.job.beginning)] == self.job.beginning else self.job.beginning
        self._add(number, [*beginning, *ids], np.array([False] * len(beginning) + loss, bool))

    def _add(self, number: int, ids: list[int], loss: np.ndarray | None) -> None:
        self.writer.write(np.array(ids, self.job.dtype), loss)
        self.writer.lengths.append(len(ids))
        self.record.documents[number] += 1
        self.record.tokens[number] += len(ids)

    def _refuse(self, number: int, bad: Bad) -> None:
        part = self.parts[number]
        file, line = where(part, bad.place)
        if not self.job.skip:
            raise BadDocument(f"{describe_place(file, line)}: {bad.reason}")
        self.record.skipped.append({"file": file, "line": line, "reason": bad.reason})
