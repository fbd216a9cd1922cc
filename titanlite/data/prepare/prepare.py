"""From text to token files, with any number of worker processes; a killed command continues from its finished units.

While it runs, everything is in .OUTPUT.unfinished, hidden, so that it is no input of a folder that both are in:

    plan.json           the options, and the inputs with their sizes and times; a command continues only its own plan
    units/00000/        the tokens of a unit of work and its record.json; the folder appears by one rename, when it is complete
    whole/              the future OUTPUT: 00000.bin, .idx, with chats .loss, ..., skipped.jsonl; manifest.json is written last
    lock                held by the running command

One rename turns whole/ into OUTPUT. Its contents depend on inputs, tokenizer and options, but not on the number of workers or
of kills.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Strict
from tqdm import tqdm

from titanlite.data.prepare.documents import Input, group, list_inputs
from titanlite.data.prepare.encode import KEPT, EncodeJob, Record, Unit, encode_all, open_record
from titanlite.data.prepare.manifest import MANIFEST, read_manifest, sealed
from titanlite.data.prepare.readers import BadDocument, describe_location
from titanlite.data.prepare.shards import smallest_type, write_shards
from titanlite.data.tokenizer import LoadedTokenizer, digest, tokenizer_digest
from titanlite.ground.errors import UserError, phase
from titanlite.ground.files import publish, replace_file, sync, sync_contents, unfinished_path
from titanlite.ground.untrusted import MIB, Absent, FileSchema, read_json

if TYPE_CHECKING:
    from titanlite.data.prepare.chat import ChatTemplate

log = logging.getLogger(__name__)

_FORMAT = 1  # of the manifest
_PLAN_FORMAT = 3  # increment it when the same plan gives other token files
_LIMIT = 1024 * MIB  # of the plan of a million inputs: 100 MiB
_LARGE_TEXT = 64 * MIB  # the tokenizer keeps strings and offsets of a whole text: 12 MB of Python took 1.5 GiB
_SPLIT_IT = "that takes some 100 times as much memory; write a .jsonl file with one document per line"
_TEXT_IS_READ = 'the text was read; without "text", the chat is. `titanlite tokenize --text-key text` does not warn'
_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"


class _Plan(FileSchema):
    """The entries of plan.json that are compared with another plan."""

    inputs: list[Annotated[tuple[str, int | None, str, list[Any]], Strict(False)]]


@phase("tokenizing")
def prepare(
    inputs: list[str],
    output: Path,
    tokenizer: LoadedTokenizer,
    *,
    text_key: str | None = None,
    append_eos: bool,
    workers: int,
    shard_tokens: int,
    on_error: str,
    chat: "ChatTemplate | None" = None,
    key: str = "--input",
) -> dict[str, Any]:
    """Writes token files and manifest.json into the new folder `output`; -> the manifest.

    inputs: as for `list_inputs`; key: the option or key that names them. tokenizer: each document begins with its `beginning`.
    text_key: as for `read`; None means "text", with a warning if entries have a chat too.
    append_eos: appends the end-of-text id to each text, not to chats. workers: processes, of one thread each. shard_tokens: the
    limit of a shard; a longer document is a shard of its own. on_error: what to do with an entry that is not a document, "fail"
    or "skip"; skipped.jsonl lists skipped entries. chat: renders chats; if None, a chat is not a document.

    Raises UserError for inputs that cannot be read, for an `output` that exists, where another command is running or has left
    unfinished work, and where the disk is too full; BadDocument with file and line for an entry that is not a document.
    """
    assert on_error in ("fail", "skip")
    output = Path(os.path.abspath(output))
    work = unfinished_path(output)
    _refuse_existing(output)
    listed = list_inputs(inputs, key, log.warning)
    for entry in listed:
        if entry.parts and entry.parts[0].kind == "text" and (entry.size or 0) > _LARGE_TEXT:
            log.warning("%s: %s bytes are one document, encoded at once: %s", entry.path, f"{entry.size:,}", _SPLIT_IT)
    plan = {  # everything that determines the token files; a command that continues may change --on-error
        "format": _PLAN_FORMAT,
        "tokenizer": tokenizer_digest(tokenizer),
        "beginning of text": list(tokenizer.beginning),
        "end of text": tokenizer.end_of_text if append_eos else None,
        "text key": text_key or "text",
        "tokens of a shard": shard_tokens,
        "chat template": digest(chat.source) if chat else None,
        "inputs": _describe_inputs(listed),
    }
    ends = tokenizer.ends if chat else frozenset()  # of files that may be broken: before the work
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work):
            _refuse_existing(output)  # another command may have finished meanwhile
            _begin_or_continue(plan, work)
            if not (work / "whole" / MANIFEST).exists():
                records = _encode(listed, work, _job(plan, work, tokenizer, on_error == "skip", chat), workers)
                if differences := _differences(plan, {**plan, "inputs": _describe_inputs(list_inputs(inputs, key))}):
                    raise UserError(f"the inputs changed while they were read: {'; '.join(differences)}")
                _assemble(listed, records, work, plan, tokenizer)
                both = sum(record.beside_chats for record in records.values())
                if both and chat and not text_key:
                    log.warning('%s entries have a text in "text" and a chat in "messages": %s', f"{both:,}", _TEXT_IS_READ)
            manifest = _hand_over(work, output)
    except OSError as error:
        remedy = KEPT if work.exists() else "name another folder"
        raise UserError(f"{error.filename or work}: cannot be written: {error.strerror}; {remedy}") from None
    if chat and manifest["chats"]:
        _warn_of_end(chat, tokenizer, ends)
        if header := chat.unprompted():
            log.warning(
                "%s: the chat template ignores add_generation_prompt, and opens turns of the assistant with %r, outside of its "
                "generation tags: a served model gets no such prompt, and did not learn to write it. End the template with "
                "{%% if add_generation_prompt %%}, this text, and {%% endif %%}",
                tokenizer.source, header,
            )  # fmt: skip
    return manifest


def _warn_of_end(chat: "ChatTemplate", tokenizer: LoadedTokenizer, ends: Collection[int]) -> None:
    """Warns where a turn that the model learns has no token at which generation stops. ends: the ids of those."""
    try:
        ids, learned = chat.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except ValueError:  # a template that needs other messages
        return
    said = [number for number, counts in zip(ids, learned, strict=True) if counts]
    if not any(number in ends for number in said):
        log.warning(
            "%s: generation stops at no token that the loss counts in a turn of a chat, %s: name the token that ends turns, as "
            '"eos_token" in tokenizer_config.json or "eos_token_id" in generation_config.json',
            tokenizer.source, tokenizer.spelled(said),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- plan


def _describe_inputs(inputs: list[Input]) -> list[list[Any]]:
    return [[entry.path, entry.size, entry.stamp, [list(part[1:]) for part in entry.parts]] for entry in inputs]


def _begin_or_continue(plan: dict[str, Any], work: Path) -> None:
    """Starts new work, or continues the same plan. Raises UserError that names the differences from another plan."""
    path = work / "plan.json"
    try:
        begun = read_json(path, _Plan, _LIMIT)
    except Absent:
        replace_file(path, json.dumps(plan))
    else:
        if differences := _differences(begun, plan):
            remedy = "Run that command again to continue it, or remove the folder to start over"
            raise UserError(f"{work}: holds the unfinished work of another command: {'; '.join(differences)}. {remedy}")
    (work / "units").mkdir(exist_ok=True)


def _differences(begun: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    names = [name for name in plan if name != "inputs" and begun.get(name) != plan[name]]
    options = [f"{name} was {begun.get(name)}, is {plan[name]}" for name in names]
    before, now = ({path: about for path, *about in entries} for entries in (begun["inputs"], plan["inputs"]))
    # a new input changes how all inputs are split, so it is named before those that only differ in this
    changes = [f"{path} is new" for path in now if path not in before]
    changes += [f"{path} is no longer among the inputs" for path in before if path not in now]
    changes += [f"{path} has changed" for path in now if path in before and before[path] != now[path]]
    if not changes and begun["inputs"] != plan["inputs"]:
        changes = ["the inputs are in another order"]
    return options + changes[:3] + ([f"and {len(changes) - 3} more such inputs"] if len(changes) > 3 else [])


# ---------------------------------------------------------------------------------------------------------------- work


def _job(plan: dict[str, Any], work: Path, tokenizer: LoadedTokenizer, skip: bool, chat: "ChatTemplate | None") -> EncodeJob:
    return EncodeJob(
        folder=work / "units",
        tokenizer=tokenizer.tokenizer.to_str(),
        beginning=plan["beginning of text"],
        end_of_text=plan["end of text"],
        dtype=smallest_type(tokenizer.vocabulary).name,
        text_key=plan["text key"],
        skip=skip,
        chat=chat,
    )


def _encode(inputs: list[Input], work: Path, job: EncodeJob, workers: int) -> dict[str, Record]:
    """Tokenizes the units that are not finished; -> the record of each unit by name, in order."""
    grouped = group([part for entry in inputs for part in entry.parts])
    units = [Unit(f"{number:05d}", parts) for number, parts in enumerate(grouped)]
    for leftover in job.folder.glob("*.tmp"):  # of workers that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    records = {unit.name: open_record(job.folder / unit.name) for unit in units if (job.folder / unit.name).exists()}
    for record in records.values():
        if record.skipped and not job.skip:  # the work began with "skip", and continues with "fail"
            first = record.skipped[0]
            raise BadDocument(f"{describe_location(first.file, first.line)}: {first.reason}")
    sizes = {unit.name: sum(part.size for part in unit.parts) for unit in units}
    missing = [unit for unit in units if unit.name not in records]
    before = sum(sizes[name] for name in records)
    documents = tokens = 0
    started = time.monotonic()
    # no bar in a log file
    with tqdm(desc="tokenizing", total=sum(sizes.values()), initial=before, disable=None, bar_format=_BAR) as bar:
        for unit, record in encode_all(job, missing, workers):
            records[unit.name] = record
            documents, tokens = documents + sum(record.documents), tokens + sum(record.tokens)
            bar.set_postfix_str(f"{documents:,} documents, {_rate(tokens, started)}", refresh=False)
            bar.update(sizes[unit.name])
    if missing:
        continued = f"; {len(units) - len(missing)} of {len(units)} units were finished before" if before else ""
        log.info("tokenized %s documents, %s%s", f"{documents:,}", _rate(tokens, started), continued)
    return {unit.name: records[unit.name] for unit in units}


def _rate(tokens: int, started: float) -> str:
    return f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"


# -------------------------------------------------------------------------------------------------------------- output


def _assemble(
    inputs: list[Input], records: dict[str, Record], work: Path, plan: dict[str, Any], tokenizer: LoadedTokenizer
) -> None:
    """Writes whole/; its manifest.json last, when everything else is on the disk."""
    whole, dtype = work / "whole", smallest_type(tokenizer.vocabulary)
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    documents = sum(sum(record.documents) for record in records.values())
    tokens = sum(sum(record.tokens) for record in records.values())
    skipped = [entry for record in records.values() for entry in record.skipped]
    chats = any(record.chats for record in records.values())
    if not documents:
        aside = f"; skipped: {len(skipped)}, such as {skipped[0].file}: {skipped[0].reason}" if skipped else ""
        shutil.rmtree(work)
        raise UserError(f"the inputs have 0 documents, 0 tokens{aside}")
    with tqdm(desc="writing shards", total=tokens, disable=None, delay=1, leave=False, bar_format=_BAR) as bar:
        units = (work / "units" / name for name in records)
        shards, largest = write_shards(units, whole, dtype, plan["tokens of a shard"], chats, bar.update)
    if skipped:
        lines = "".join(json.dumps(entry.model_dump(), ensure_ascii=False) + "\n" for entry in skipped)
        (whole / "skipped.jsonl").write_text(lines, encoding="utf-8")
    sync_contents(whole)
    contents = "".join(f" {shard['bin']} {shard['lengths']} {shard['loss']}" for shard in shards)
    manifest = {
        "format": _FORMAT,
        "tokenizer": plan["tokenizer"],
        "vocabulary": tokenizer.vocabulary,
        "largest_id": largest,
        "beginning_of_text": plan["beginning of text"],
        "end_of_text": plan["end of text"],
        "documents": documents,
        "tokens": tokens,
        "chats": chats,
        "shards": shards,
        "inputs": _count_inputs(inputs, records),
        "skipped": len(skipped),
        "fingerprint": digest(plan["tokenizer"] + contents),
    }
    replace_file(whole / MANIFEST, json.dumps(sealed(manifest), indent=1, ensure_ascii=False) + "\n")
    sync(whole)


def _count_inputs(inputs: list[Input], records: dict[str, Record]) -> list[dict[str, Any]]:
    documents = iter([count for record in records.values() for count in record.documents])
    tokens = iter([count for record in records.values() for count in record.tokens])
    return [
        {
            "path": entry.path,
            "bytes": entry.size,
            "documents": sum(next(documents) for _ in entry.parts),
            "tokens": sum(next(tokens) for _ in entry.parts),
        }
        for entry in inputs
    ]


def _hand_over(work: Path, output: Path) -> dict[str, Any]:
    """Renames whole/ to OUTPUT and removes the rest; it can be repeated after a kill."""
    shutil.rmtree(work / "units", ignore_errors=True)
    manifest = read_manifest(work / "whole")
    publish(work / "whole", output)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


# --------------------------------------------------------------------------------------------------------------- files


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise UserError(f"{output}: already exists; name another folder, or remove it")


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    with open(work / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{work}: another command is running in it") from None
        yield
