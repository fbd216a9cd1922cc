"""Units of work: some parts of the inputs, tokenized by this process or by workers into a folder that appears at once."""

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
from tokenizers import Tokenizer

from titanlite.data.indexed import Writer
from titanlite.data.prepare.readers import Bad, BadDocument, Document, Part, describe_place, read, where
from titanlite.errors import UserError
from titanlite.files import sync, sync_contents
from titanlite.launch import children

if TYPE_CHECKING:
    from titanlite.data.prepare.chat import ChatTemplate

KEPT = "what is finished is kept: the same command goes on with it"
_BATCH = 2**21  # characters that are encoded at once
_BATCH_DOCUMENTS = 8192  # and as many documents at most


class Job(NamedTuple):
    """What is the same for all units."""

    folder: Path  # of the finished units
    tokenizer: str  # as JSON
    special_as_text: bool  # a document that spells a special token out has its letters, not its id
    end_of_text: int | None  # behind each text
    kind: str  # of the ids, a NumPy type
    text_key: str
    skip: bool  # what is no document, in place of ending
    chat: "ChatTemplate | None"


class Unit(NamedTuple):
    name: str
    parts: list[Part]


class Record(NamedTuple):
    """What a finished unit holds; beside tokens.bin, .idx and perhaps .loss it stands as record.json."""

    documents: list[int]  # of each part
    tokens: list[int]
    chats: bool
    skipped: list[dict[str, Any]]


def open_record(folder: Path) -> Record:
    """The record of a finished unit, which is a folder."""
    return Record(**json.loads((folder / "record.json").read_text(encoding="utf-8")))


def encode_all(job: Job, units: list[Unit], workers: int) -> Iterator[tuple[Unit, Record]]:
    """Finishes units, and yields each when it is; with several workers in any order.

    One worker is this process, with the tokenizer's threads. Raises UserError (BadDocument for content) from the unit at fault,
    and where a worker was killed.
    """
    # a daemon of multiprocessing, such as another library's worker, may have no children
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
                theirs.close()  # so that the end of the worker is the end of what can be read from it
                processes[ours] = process
                ours.send(next(queue))
        yield from _gather(list(processes), queue)
    except (EOFError, ConnectionError):
        connection.wait([process.sentinel for process in processes.values()], timeout=1.0)
        codes = [process.exitcode for process in processes.values() if process.exitcode]
        how = f"by signal {-codes[0]}" if codes and codes[0] < 0 else f"with exit code {codes[0]}" if codes else "unseen"
        raise UserError(
            f"a worker that tokenizes has ended {how}, as it does when memory runs out; fewer workers need less; {KEPT}"
        ) from None
    finally:
        for process in processes.values():  # what they have finished is on the disk
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
    """A worker: answers each unit with (unit, record), or with an exception."""
    children.end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    tokenizer = _tokenizer(job)
    with contextlib.suppress(EOFError, ConnectionError):  # the command is gone
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
    tokenizer.encode_special_tokens = job.special_as_text  # which its JSON does not tell
    return tokenizer


def _finish(job: Job, tokenizer: Tokenizer, unit: Unit) -> Record:
    """Makes a unit's folder under another name, and renames it when all of it is on the disk."""
    making = job.folder / f"{unit.name}.{os.getpid()}.tmp"
    try:
        making.mkdir()
        record = _Encoder(job, tokenizer, unit, making).run()
        (making / "record.json").write_text(json.dumps(record._asdict()), encoding="utf-8")
        sync_contents(making)
        # A worker of a command that was just killed may have finished it at this very moment; its folder holds the same.
        if not (job.folder / unit.name).exists():
            making.rename(job.folder / unit.name)
        sync(job.folder)
    except OSError as error:
        raise UserError(f"{error.filename or making}: cannot be written: {error.strerror}; {KEPT}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return record


class _Encoder:
    """Documents of a unit on their way to its token file, in order."""

    def __init__(self, job: Job, tokenizer: Tokenizer, unit: Unit, folder: Path):
        self.job, self.tokenizer, self.parts = job, tokenizer, unit.parts
        # whether it holds a chat is known at the end
        self.writer = Writer(folder / "tokens", np.dtype(job.kind), losses=job.chat is not None)
        self.record = Record([0] * len(unit.parts), [0] * len(unit.parts), False, [])
        self.waiting: list[tuple[int, Document | Bad]] = []  # (part, what it holds)

    def run(self) -> Record:
        characters = 0
        for number, part in enumerate(self.parts):
            for found in read(part, self.job.text_key):
                self.waiting.append((number, found))
                characters += len(found.content) if isinstance(found, Document) else 0
                if characters >= _BATCH or len(self.waiting) >= _BATCH_DOCUMENTS:
                    self._encode()
                    characters = 0
        self._encode()
        self.writer.close()
        if not self.record.chats:
            self.writer.prefix.with_name("tokens.loss").unlink(missing_ok=True)
        return self.record

    def _encode(self) -> None:
        texts = [found.content for _, found in self.waiting if isinstance(found, Document) and isinstance(found.content, str)]
        encoded = iter(self._encode_texts(texts))
        for number, found in self.waiting:
            if isinstance(found, Bad):
                self._refuse(number, found)
            elif isinstance(found.content, str):
                ids = next(encoded)
                if isinstance(ids, str):
                    self._refuse(number, Bad(found.place, ids))
                    continue
                if self.job.end_of_text is not None:
                    ids.append(self.job.end_of_text)
                self._add(number, ids, None)
            else:
                self._encode_chat(number, found)
        self.waiting.clear()

    def _encode_texts(self, texts: list[str]) -> Iterator[list[int] | str]:
        """The ids of each text, or why it has none."""
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # the library's only class; it does not say which text it was
            for text in texts:
                try:
                    yield self.tokenizer.encode(text, add_special_tokens=False).ids
                except Exception as error:
                    yield f"the tokenizer cannot encode it: {error}"
        else:
            yield from (encoding.ids for encoding in encodings)

    def _encode_chat(self, number: int, found: Document) -> None:
        if self.job.chat is None:
            self._refuse(number, Bad(found.place, "a chat, and the tokenizer's folder has no chat template"))
            return
        try:
            ids, loss = self.job.chat.encode(found.content)
        except ValueError as error:
            self._refuse(number, Bad(found.place, f"a chat that cannot be rendered: {error}"))
            return
        self.record = self.record._replace(chats=True)
        self._add(number, ids, np.array(loss, bool))

    def _add(self, number: int, ids: list[int], loss: np.ndarray | None) -> None:
        self.writer.add(np.array(ids, self.job.kind), loss)
        self.record.documents[number] += 1
        self.record.tokens[number] += len(ids)

    def _refuse(self, number: int, found: Bad) -> None:
        part = self.parts[number]
        file, line = where(part, found.place)
        if not self.job.skip:
            raise BadDocument(f"{describe_place(file, line)}: {found.reason}")
        self.record.skipped.append({"file": file, "line": line, "reason": found.reason})
