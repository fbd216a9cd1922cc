"""Tokenizes units of work, in workers or in this process; a unit becomes a folder that appears by one rename."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict
from tokenizers import Tokenizer

from titanlite.data.prepare.limits import Limits
from titanlite.data.prepare.readers import Bad, BadDocument, Document, Part, describe_place, read, where
from titanlite.data.prepare.shards import TokenWriter
from titanlite.data.tokenizer import encode_texts
from titanlite.errors import UserError
from titanlite.files import sync, sync_contents
from titanlite.launch import children
from titanlite.outside import MIB, Contents, Count, read_json

if TYPE_CHECKING:
    from titanlite.data.prepare.chat import ChatTemplate

KEPT = "finished units are kept: the same command continues from them"
_LIMIT = 1024 * MIB  # of a record: as many skipped entries as lines
# What is encoded under one limit: limits for each document of 300 characters cost a quarter of the processor time.
_CHARACTERS, _DOCUMENTS = 2**16, 256


class Job(NamedTuple):
    """The parameters that all units share."""

    folder: Path  # of the finished units
    tokenizer: str  # as JSON
    source: str  # the tokenizer's file; empty: titanlite's own tokenizer, which needs no limits
    beginning: list[int]  # of each document; a chat whose template writes it gets no second one
    end_of_text: int | None  # appended to each text
    dtype: str  # of the ids, a NumPy type
    text_key: str
    skip: bool  # entries that are not documents; False: raise
    chat: "ChatTemplate | None"
    limits: Limits


Place = tuple[int, int]  # number of the part, and the place in it; -1: the part has only one document
_Encoded = tuple[list[int], np.ndarray | None]  # the ids of a document and, for a chat, which of them are learnt


class Unit(NamedTuple):
    name: str
    parts: list[Part]
    one_by_one: bool = False  # after documents ended a worker together: which of them it was
    refused: dict[Place, str] = {}  # noqa: RUF012  # documents that ended a worker, and why


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

    A tokenizer or template from elsewhere runs in workers only, which `limits` can end. Raises UserError for a unit that fails
    (BadDocument for its contents), and for a worker that was killed.
    """
    count = min(workers, len(units))
    # a daemonic process of multiprocessing, such as another library's worker, cannot have children
    if (count <= 1 and not job.source) or multiprocessing.current_process().daemon:
        tokenizer = _tokenizer(job)
        for unit in units:
            yield unit, _Encoder(job, tokenizer, unit).finish()
        return
    queue, pool = iter(units), [_Worker(job) for _ in range(count)]
    try:
        busy = {worker.start(unit): worker for worker, unit in zip(pool, queue, strict=False)}
        while busy:
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, connection.Connection)
                worker = busy.pop(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    busy[worker.start(worker.without_its_document())] = worker
                    continue
                if isinstance(answer, Exception):
                    raise answer
                if following := next(queue, None):
                    busy[worker.send(following)] = worker
                yield answer
    finally:
        for worker in pool:  # the units that they have finished are on the disk
            worker.end()


class _Worker:
    """A process that tokenizes units, and another one after each that a document has ended."""

    def __init__(self, job: Job):
        self.job = job
        self.process: Any = None

    def start(self, unit: Unit) -> connection.Connection:
        """Starts a process with a unit; -> where it answers."""
        context = multiprocessing.get_context("spawn")
        self.at = context.RawArray("q", [0, -1])  # the Place of the document that it encodes
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(self.job, theirs, self.at), daemon=True)
        with children.starting({signal.SIGINT}):
            self.process.start()
        theirs.close()  # so that reading from the pipe ends when the worker ends
        return self.send(unit)

    def send(self, unit: Unit) -> connection.Connection:
        self.unit = unit
        with contextlib.suppress(ConnectionError):  # it has ended: so does reading from the pipe
            self.pipe.send(unit)
        return self.pipe

    def without_its_document(self) -> Unit:
        """After the end of the process: its unit one document at a time, or without the document that it could not encode.

        Raises BadDocument for that document, if such entries are not skipped, and UserError for any other end.
        """
        self.process.join(timeout=1.0)
        code: int | None = self.process.exitcode
        number, place = int(self.at[0]), int(self.at[1])
        document = describe_place(*where(self.unit.parts[number], None if place < 0 else place))
        reason = self.job.limits.excess(code)
        if not reason or not self.job.source:
            how = f" by signal {-code}" if code and code < 0 else f" with exit code {code}" if code else ""
            raise UserError(
                f"a tokenizer worker has ended{how}, perhaps because memory ran out; it was at {document}"
                f"{'' if self.unit.one_by_one else ' or soon behind it'}; fewer workers need less; {KEPT}"
            )
        if not self.unit.one_by_one:
            self.end()
            return self.unit._replace(one_by_one=True)
        reason = f"the tokenizer, or its chat template, {reason} ({self.job.source})"
        if not self.job.skip:
            raise BadDocument(f"{document}: {reason}")
        self.end()
        return self.unit._replace(refused={**self.unit.refused, (number, place): reason})

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.join()


def _work(job: Job, pipe: connection.Connection, at: Any) -> None:
    """A worker: answers each unit with (unit, record) or with an exception. at: where it notes the Place of each document."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    children.end_with_parent(parent.pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library prints a backtrace beside its exceptions
    tokenizer = _tokenizer(job)
    with contextlib.suppress(EOFError, ConnectionError):  # the command has ended
        while True:
            unit = pipe.recv()
            try:
                answer: Any = unit, _Encoder(job, tokenizer, unit, at).finish()
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            pipe.send(answer)


def _tokenizer(job: Job) -> Tokenizer:
    tokenizer = Tokenizer.from_str(job.tokenizer)
    tokenizer.encode_special_tokens = True  # as `describe` sets it, which is not part of the JSON
    return tokenizer


def _chunks(entries: Iterable[Document | Bad]) -> Iterator[list[Document | Bad]]:
    """Entries in order, as many together as are encoded under one limit."""
    chunk: list[Document | Bad] = []
    characters = 0
    for entry in entries:
        chunk.append(entry)
        characters += _characters(entry) if isinstance(entry, Document) else 0
        if characters >= _CHARACTERS or len(chunk) >= _DOCUMENTS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _characters(document: Document) -> int:
    return len(document.content) if isinstance(document.content, str) else len(repr((document.content, document.tools)))


def _place(document: Document, number: int) -> Place:
    """number: of the part."""
    return number, -1 if document.place is None else document.place


class _Encoder:
    """Encodes the documents of a unit, in order, into its token file."""

    def __init__(self, job: Job, tokenizer: Tokenizer, unit: Unit, at: Any = None):
        """at: of a worker; None: this is the process of the command, and limits nothing."""
        self.job, self.tokenizer, self.unit, self.at = job, tokenizer, unit, at
        self.record = Record([0] * len(unit.parts), [0] * len(unit.parts), False, [])

    def finish(self) -> Record:
        """Writes the unit's folder under a temporary name, and renames it when all of it is on the disk."""
        folder = self.job.folder
        unfinished = folder / f"{self.unit.name}.{os.getpid()}.tmp"
        try:
            unfinished.mkdir()
            self._run(unfinished)
            (unfinished / "record.json").write_text(json.dumps(self.record._asdict()), encoding="utf-8")
            sync_contents(unfinished)
            # A worker of a command that was just killed may have finished this unit meanwhile, with the same contents.
            if not (folder / self.unit.name).exists():
                unfinished.rename(folder / self.unit.name)
            sync(folder)
        except OSError as error:
            raise UserError(f"{error.filename or unfinished}: cannot be written: {error.strerror}; {KEPT}") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return self.record

    def _run(self, folder: Path) -> None:
        # only at the end it is known whether the unit holds a chat
        self.writer = TokenWriter(folder / "tokens", np.dtype(self.job.dtype), losses=self.job.chat is not None)
        for number, part in enumerate(self.unit.parts):
            for chunk in _chunks(read(part, self.job.text_key)):
                for result in self._encode(chunk, number):
                    if isinstance(result, Bad):
                        self._refuse(number, result)
                    else:
                        self._add(number, *result)
        self.writer.close()
        if not self.record.chats:
            self.writer.prefix.with_name("tokens.loss").unlink(missing_ok=True)

    def _encode(self, chunk: list[Document | Bad], number: int) -> Iterable[_Encoded | Bad]:
        """What becomes of each entry. number: of the part.

        A fault that documents have together is decided by each of them alone.
        """
        if not self.unit.one_by_one and (together := self._encode_together(chunk, number)):
            return together
        return (self._encode_alone(entry, number) if isinstance(entry, Document) else entry for entry in chunk)

    def _encode_together(self, chunk: list[Document | Bad], number: int) -> list[_Encoded | Bad] | None:
        documents = [entry for entry in chunk if isinstance(entry, Document)]
        texts = [entry.content for entry in documents if isinstance(entry.content, str)]
        with self._limited(documents, number, self.job.limits.of_many()):
            try:
                encoded = iter(encode_texts(self.tokenizer, texts))
                results = [
                    entry
                    if isinstance(entry, Bad)
                    else self._framed(next(encoded))
                    if isinstance(entry.content, str)
                    else self._encode_chat(entry)
                    for entry in chunk
                ]
            except (ValueError, MemoryError):
                return None
        failed = any(
            isinstance(result, Bad) and isinstance(entry, Document) for entry, result in zip(chunk, results, strict=True)
        )
        return None if failed else results

    def _encode_alone(self, entry: Document, number: int) -> _Encoded | Bad:
        if reason := self.unit.refused.get(_place(entry, number)):
            return Bad(entry.place, reason)
        with self._limited([entry], number, self.job.limits):
            if not isinstance(entry.content, str):
                return self._encode_chat(entry)
            try:
                return self._framed(encode_texts(self.tokenizer, [entry.content])[0])
            except ValueError as error:
                return Bad(entry.place, str(error))

    def _limited(self, documents: list[Document], number: int, limits: Limits) -> contextlib.AbstractContextManager[None]:
        """Around the work on documents; only in a worker, which notes the first of them."""
        if self.at is None or not documents:
            return contextlib.nullcontext()
        self.at[:] = _place(documents[0], number)
        return limits.on(sum(map(_characters, documents)))

    def _framed(self, ids: list[int]) -> _Encoded:
        """The ids of a text with those that begin and end it."""
        return [*self.job.beginning, *ids, *([] if self.job.end_of_text is None else [self.job.end_of_text])], None

    def _encode_chat(self, entry: Document) -> _Encoded | Bad:
        beginning = self.job.beginning
        assert isinstance(entry.content, list)
        if self.job.chat is None:
            return Bad(entry.place, "a chat, but the tokenizer's folder has no chat template")
        try:
            ids, loss = self.job.chat.encode(entry.content, entry.tools)
        except (ValueError, TypeError) as error:  # TypeError: the tokenizer's for text that is not Unicode
            return Bad(entry.place, f"a chat that cannot be rendered: {error}")
        self.record = self.record._replace(chats=True)
        beginning = [] if ids[: len(beginning)] == beginning else beginning
        return [*beginning, *ids], np.array([False] * len(beginning) + loss, bool)

    def _add(self, number: int, ids: list[int], loss: np.ndarray | None) -> None:
        self.writer.write(np.array(ids, self.job.dtype), loss)
        self.writer.lengths.append(len(ids))
        self.record.documents[number] += 1
        self.record.tokens[number] += len(ids)

    def _refuse(self, number: int, bad: Bad) -> None:
        part = self.unit.parts[number]
        file, line = where(part, bad.place)
        if not self.job.skip:
            raise BadDocument(f"{describe_place(file, line)}: {bad.reason}")
        self.record.skipped.append({"file": file, "line": line, "reason": bad.reason})
