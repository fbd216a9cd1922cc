"""Tokenizes units of work, in workers or in this process; a unit becomes a folder that appears by one rename."""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict
from tokenizers import Tokenizer

from titanlite.data.prepare.readers import Bad, BadDocument, Document, InputRange, describe_location, read, where
from titanlite.data.prepare.shards import TokenWriter
from titanlite.data.tokenizer import refusing
from titanlite.ground.errors import UserError
from titanlite.ground.files import publish, sync_contents
from titanlite.ground.untrusted import MIB, Count, FileSchema, read_json
from titanlite.launch import children

if TYPE_CHECKING:
    from titanlite.data.prepare.chat import ChatTemplate

KEPT = "finished units are kept: the same command continues from them"
_LIMIT = 1024 * MIB  # of a record, which may list every line as skipped
_CHARACTERS, _DOCUMENTS = 2**16, 256  # what the tokenizer encodes in one call


class EncodeJob(NamedTuple):
    """The parameters that all units share."""

    folder: Path  # of the finished units
    tokenizer: str  # as JSON
    beginning: list[int]  # the ids that begin each document; not repeated where a chat's template writes them
    end_of_text: int | None  # appended to each text
    dtype: str  # of the ids, a NumPy type
    text_key: str
    skip: bool  # entries that are not documents; False: raise
    chat: "ChatTemplate | None"


_Encoded = tuple[list[int], np.ndarray | None]  # the ids of a document and, for a chat, which of them are learned


class Unit(NamedTuple):
    name: str
    parts: list[InputRange]


class Skipped(FileSchema):
    """An entry of record.json and of skipped.jsonl."""

    file: str
    line: Count | None
    reason: str


class Record(FileSchema):
    """The contents of a finished unit: its record.json, beside tokens.bin, tokens.idx and, with chats, tokens.loss."""

    model_config = ConfigDict(extra="forbid")

    documents: list[Count]  # of each part
    tokens: list[Count]
    chats: bool
    skipped: list[Skipped]
    beside_chats: Count = 0  # texts whose entry has a chat too


def open_record(folder: Path) -> Record:
    """The record in the folder of a finished unit."""
    return Record(**read_json(folder / "record.json", Record, _LIMIT))


def encode_all(job: EncodeJob, units: list[Unit], workers: int) -> Iterator[tuple[Unit, Record]]:
    """Tokenizes units, and yields each when it is finished; with several workers in any order.

    Raises UserError for a unit that fails (BadDocument for its contents), and for a worker that was killed.
    """
    count = min(workers, len(units))
    # a daemonic process of multiprocessing, such as another library's worker, cannot have children
    if count <= 1 or multiprocessing.current_process().daemon:
        tokenizer = _tokenizer(job)
        for unit in units:
            yield unit, _Encoder(job, tokenizer, unit).finish()
        return
    queue, pool = iter(units), list[_Worker]()
    try:
        for unit in itertools.islice(queue, count):
            pool.append(_Worker(job, unit))
        busy = {worker.pipe: worker for worker in pool}
        while busy:
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, connection.Connection)
                worker = busy.pop(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    raise UserError(worker.end_report()) from None
                if isinstance(answer, Exception):
                    raise answer
                if following := next(queue, None):
                    worker.send(following)
                    busy[pipe] = worker
                yield answer
    finally:
        for worker in pool:  # the units that they have finished are on the disk
            worker.end()


class _Worker:
    """A process that tokenizes units."""

    def __init__(self, job: EncodeJob, unit: Unit):
        """unit: the first one."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(job, theirs), daemon=True)
        with children.starting(children.TO_ALL):
            self.process.start()
        theirs.close()  # so that a read from the pipe ends when the worker ends
        self.send(unit)

    def send(self, unit: Unit) -> None:
        self.unit = unit
        with contextlib.suppress(ConnectionError):  # it has ended, and the next read from the pipe reports that
            self.pipe.send(unit)

    def end_report(self) -> str:
        """Why the worker has ended."""
        self.process.join(timeout=1.0)
        code = self.process.exitcode
        how = f" by signal {-code}" if code and code < 0 else f" with exit code {code}" if code else ""
        files = " to ".join(dict.fromkeys((self.unit.parts[0].path, self.unit.parts[-1].path)))
        return f"a tokenizer worker has ended{how}, perhaps because memory ran out, in {files}; fewer workers need less; {KEPT}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _work(job: EncodeJob, pipe: connection.Connection) -> None:
    """A worker: answers each unit with (unit, record) or with an exception."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    children.end_with_parent(parent.pid)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library prints a backtrace beside its exceptions
    tokenizer = _tokenizer(job)
    with contextlib.suppress(EOFError, ConnectionError):  # the command has ended
        while True:
            unit = pipe.recv()
            try:
                answer: Any = unit, _Encoder(job, tokenizer, unit).finish()
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            pipe.send(answer)


def _tokenizer(job: EncodeJob) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers counts processes of one thread
    tokenizer = Tokenizer.from_str(job.tokenizer)
    tokenizer.encode_special_tokens = True  # as `describe` sets it, which is not part of the JSON
    return tokenizer


def _chunks(entries: Iterable[Document | Bad]) -> Iterator[list[Document | Bad]]:
    """Entries in order, in chunks that are encoded in one call."""
    chunk: list[Document | Bad] = []
    characters = 0
    for entry in entries:
        chunk.append(entry)
        characters += 0 if isinstance(entry, Bad) else len(entry.content if isinstance(entry.content, str) else repr(entry))
        if characters >= _CHARACTERS or len(chunk) >= _DOCUMENTS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def render(template: "ChatTemplate | None", entry: Document) -> tuple[list[int], list[bool]] | Bad:
    """The ids of a chat, and which of them are learned; or the reason against it."""
    assert isinstance(entry.content, list)
    if template is None:
        return Bad(entry.location, "a chat, but the tokenizer's folder has no chat template")
    try:
        return template.encode(entry.content, entry.tools)
    except (ValueError, TypeError) as error:  # the tokenizer raises TypeError for text that is not Unicode
        return Bad(entry.location, f"a chat that cannot be rendered: {error}")


class _Encoder:
    """Encodes the documents of a unit, in order, into its token file."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer, unit: Unit):
        self.job, self.tokenizer, self.unit = job, tokenizer, unit
        self.record = Record(documents=[0] * len(unit.parts), tokens=[0] * len(unit.parts), chats=False, skipped=[])

    def finish(self) -> Record:
        """Writes the unit's folder under a temporary name, and renames it when all of it is on the disk."""
        folder = self.job.folder
        unfinished = folder / f"{self.unit.name}.{os.getpid()}.tmp"
        try:
            unfinished.mkdir()
            self._run(unfinished)
            (unfinished / "record.json").write_text(json.dumps(self.record.model_dump()), encoding="utf-8")
            sync_contents(unfinished)
            # A worker of a command that was just killed may have finished this unit meanwhile, with the same contents.
            if not (folder / self.unit.name).exists():
                publish(unfinished, folder / self.unit.name)
        except OSError as error:
            raise UserError(f"{error.filename or unfinished}: cannot be written: {error.strerror}; {KEPT}") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return self.record

    def _run(self, folder: Path) -> None:
        # only at the end it is known whether the unit has a chat
        self.writer = TokenWriter(folder / "tokens", np.dtype(self.job.dtype), losses=self.job.chat is not None)
        for number, part in enumerate(self.unit.parts):
            for chunk in _chunks(read(part, self.job.text_key)):
                for result in self._encode(chunk):
                    if isinstance(result, Bad):
                        self._refuse(number, result)
                    else:
                        self._add(number, *result)
        self.writer.close()
        if not self.record.chats:
            self.writer.prefix.with_name("tokens.loss").unlink(missing_ok=True)

    def _encode(self, chunk: list[Document | Bad]) -> Iterator[_Encoded | Bad]:
        """The encoded form of each entry, or the reason against it."""
        texts = [entry for entry in chunk if isinstance(entry, Document) and isinstance(entry.content, str)]
        encoded = iter(self._encode_texts(texts))
        for entry in chunk:
            if isinstance(entry, Bad):
                yield entry
            else:
                self.record.beside_chats += entry.beside_chat
                yield next(encoded) if isinstance(entry.content, str) else self._encode_chat(entry)

    def _encode_texts(self, texts: list[Document]) -> list[_Encoded | Bad]:
        """Encodes texts in one call, which is much faster. If it fails, encodes them one by one to find the text at fault."""
        try:
            with refusing(ValueError, "the tokenizer cannot encode it"):
                contents = [str(entry.content) for entry in texts]
                encodings = self.tokenizer.encode_batch_fast(contents, add_special_tokens=False)
        except ValueError as error:
            if len(texts) == 1:
                return [Bad(texts[0].location, str(error))]
            return [result for entry in texts for result in self._encode_texts([entry])]
        end = [] if self.job.end_of_text is None else [self.job.end_of_text]
        return [([*self.job.beginning, *encoding.ids, *end], None) for encoding in encodings]

    def _encode_chat(self, entry: Document) -> _Encoded | Bad:
        beginning = self.job.beginning
        rendered = render(self.job.chat, entry)
        if isinstance(rendered, Bad):
            return rendered
        ids, loss = rendered
        self.record.chats = True
        beginning = [] if ids[: len(beginning)] == beginning else beginning
        return [*beginning, *ids], np.array([False] * len(beginning) + loss, bool)

    def _add(self, number: int, ids: list[int], loss: np.ndarray | None) -> None:
        self.writer.write(np.array(ids, self.job.dtype), loss)
        self.writer.lengths.append(len(ids))
        self.record.documents[number] += 1
        self.record.tokens[number] += len(ids)

    def _refuse(self, number: int, bad: Bad) -> None:
        part = self.unit.parts[number]
        file, line = where(part, bad.location)
        reason = bad.reason.encode("utf-8", "backslashreplace").decode()  # it may quote bytes that are no UTF-8
        if not self.job.skip:
            raise BadDocument(f"{describe_location(file, line)}: {reason}")
        self.record.skipped.append(Skipped(file=file, line=line, reason=reason))
