"""From text to token files, by as many processes as there are, and again from where it was when they were killed.

While it works, everything is in OUTPUT.unfinished:

    plan.json           what was asked for, and the inputs with their sizes and times; a command goes on with its own plan only
    units/00000/        the tokens of a unit of work and its record.json; a folder appears by one rename, when all is written
    whole/              what will be OUTPUT: 00000.bin, .idx, perhaps .loss, ..., skipped.jsonl; last of all manifest.json
    lock                held by the command that works here

One rename makes OUTPUT of whole/. What it holds follows from inputs, tokenizer and options: not from the number of workers, nor
from how often they were killed.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from titanlite.data.indexed import smallest_type
from titanlite.data.prepare.documents import Input, group, list_inputs
from titanlite.data.prepare.encode import KEPT, Job, Record, Unit, encode_all, open_record
from titanlite.data.prepare.readers import BadDocument, describe_place
from titanlite.data.prepare.shards import write_shards
from titanlite.data.tokenizer import LoadedTokenizer, tokenizer_digest
from titanlite.errors import UserError
from titanlite.files import sync, sync_contents

if TYPE_CHECKING:
    from titanlite.data.prepare.chat import ChatTemplate

log = logging.getLogger(__name__)

_FORMAT = 1  # of plan and manifest
_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"


def prepare(
    inputs: list[str],
    output: Path,
    tokenizer: LoadedTokenizer,
    *,
    text_key: str = "text",
    append_eos: bool,
    workers: int,
    shard_tokens: int,
    on_error: str,
    best_fit: int | None = None,
    chat: "ChatTemplate | None" = None,
    key: str = "--input",
) -> dict[str, Any]:
    """Writes token files and manifest.json into the new folder `output`; -> the manifest.

    inputs: as `list_inputs` takes them, and key: what the user calls them. append_eos: closes each text, but no chat, with
    the end-of-text id. workers: 1 is this process, with the tokenizer's threads. shard_tokens: of a shard at most; a longer
    document is a shard of its own. on_error: "fail" or "skip" what is no document; skipped ones are listed in skipped.jsonl.
    best_fit: a seq_len for which to pack each shard. chat: renders chats; without it they are no documents.

    Raises UserError for inputs that cannot be read, for an `output` that exists, where another command is at work or has left
    work undone, and where there is no room; BadDocument with file and line for what is no document.
    """
    assert on_error in ("fail", "skip")
    output = Path(os.path.abspath(output))
    work = output.with_name(f"{output.name}.unfinished")
    _refuse_existing(output, work)
    found = list_inputs(inputs, key)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work):
            _refuse_existing(output, work)  # another command may have finished it meanwhile
            plan = _plan(found, tokenizer, text_key, append_eos, shard_tokens, best_fit, chat)
            _take_up(plan, work)
            if not (work / "whole" / "manifest.json").exists():
                records = _encode(found, work, _job(plan, work, tokenizer, on_error == "skip", chat), workers)
                _refuse_changed(plan, list_inputs(inputs, key))
                _assemble(found, records, work, plan, tokenizer)
            return _hand_over(work, output)
    except OSError as error:
        remedy = KEPT if work.exists() else "name another folder"
        raise UserError(f"{error.filename or work}: cannot be written: {error.strerror}; {remedy}") from None


# ---------------------------------------------------------------------------------------------------------------- plan


def _plan(
    inputs: list[Input],
    tokenizer: LoadedTokenizer,
    text_key: str,
    append_eos: bool,
    shard_tokens: int,
    best_fit: int | None,
    chat: "ChatTemplate | None",
) -> dict[str, Any]:
    """Everything that decides what the token files hold, but for what is skipped: to skip may be decided on the way."""
    return {
        "format": _FORMAT,
        "tokenizer": tokenizer_digest(tokenizer),
        "end of text": tokenizer.end_of_text if append_eos else None,
        "text key": text_key,
        "tokens of a shard": shard_tokens,
        "best fit": best_fit,
        "chat template": hashlib.blake2b(chat.source.encode(), digest_size=16).hexdigest() if chat else None,
        "inputs": [[entry.path, entry.size, entry.stamp, [list(part[1:]) for part in entry.parts]] for entry in inputs],
    }


def _take_up(plan: dict[str, Any], work: Path) -> None:
    """Begins anew, or goes on with the same plan; raises UserError that says what differs from the one that was begun."""
    path = work / "plan.json"
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        if differences := _differences(begun, plan):
            raise UserError(
                f"{work}: holds the unfinished work of another command: {'; '.join(differences)}. "
                "Give that command again to go on with it, or remove the folder to begin anew"
            )
    else:
        _write_at_once(path, json.dumps(plan))
    (work / "units").mkdir(exist_ok=True)


def _differences(begun: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    names = [name for name in plan if name != "inputs" and begun.get(name) != plan[name]]
    found = [f"{name} was {begun.get(name)}, is {plan[name]}" for name in names]
    before, now = ({path: about for path, *about in entries} for entries in (begun["inputs"], plan["inputs"]))
    changes = [f"{path} is new" for path in now if path not in before]
    changes += [f"{path} is no more among the inputs" for path in before if path not in now]
    changes += [f"{path} has changed" for path in now if path in before and before[path] != now[path]]
    if not changes and begun["inputs"] != plan["inputs"]:
        changes = ["the inputs come in another order"]
    return found + changes[:3] + ([f"and {len(changes) - 3} more such inputs"] if len(changes) > 3 else [])


def _refuse_changed(plan: dict[str, Any], inputs: list[Input]) -> None:
    now = {**plan, "inputs": [[entry.path, entry.size, entry.stamp, [list(p[1:]) for p in entry.parts]] for entry in inputs]}
    if differences := _differences(plan, now):
        raise UserError(f"the inputs have changed while they were read: {'; '.join(differences)}")


# ---------------------------------------------------------------------------------------------------------------- work


def _job(plan: dict[str, Any], work: Path, tokenizer: LoadedTokenizer, skip: bool, chat: "ChatTemplate | None") -> Job:
    return Job(
        folder=work / "units",
        tokenizer=tokenizer.tokenizer.to_str(),
        special_as_text=tokenizer.tokenizer.encode_special_tokens,
        end_of_text=plan["end of text"],
        kind=smallest_type(tokenizer.vocabulary).name,
        text_key=plan["text key"],
        skip=skip,
        chat=chat,
    )


def _encode(inputs: list[Input], work: Path, job: Job, workers: int) -> dict[str, Record]:
    """Finishes the units that are not; -> the record of each, by name, in order."""
    grouped = group([part for entry in inputs for part in entry.parts])
    units = [Unit(f"{number:05d}", parts) for number, parts in enumerate(grouped)]
    for leftover in job.folder.glob("*.tmp"):  # of workers that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    records = {unit.name: open_record(job.folder / unit.name) for unit in units if (job.folder / unit.name).exists()}
    for record in records.values():
        _refuse_skipped(record, job.skip)
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
        goes_on = f"; {len(units) - len(missing)} of {len(units)} units were there already" if before else ""
        log.info("tokenized %s documents, %s%s", f"{documents:,}", _rate(tokens, started), goes_on)
    return {unit.name: records[unit.name] for unit in units}


def _rate(tokens: int, started: float) -> str:
    return f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"


def _refuse_skipped(record: Record, skip: bool) -> None:
    """Work that was begun with "skip" and goes on with "fail"."""
    if record.skipped and not skip:
        first = record.skipped[0]
        raise BadDocument(f"{describe_place(first['file'], first['line'])}: {first['reason']}")


# -------------------------------------------------------------------------------------------------------------- output


def _assemble(
    inputs: list[Input], records: dict[str, Record], work: Path, plan: dict[str, Any], tokenizer: LoadedTokenizer
) -> None:
    """Makes whole/; its manifest.json is written when all else is on the disk."""
    whole, kind = work / "whole", smallest_type(tokenizer.vocabulary)
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    documents, tokens = (sum(sum(record[field]) for record in records.values()) for field in (0, 1))
    skipped = [entry for record in records.values() for entry in record.skipped]
    chats = any(record.chats for record in records.values())
    if not documents:
        aside = f", and {len(skipped)} entries that are none, such as {_first(skipped)}" if skipped else ""
        shutil.rmtree(work)
        raise UserError(f"the inputs hold 0 documents, 0 tokens{aside}")
    _refuse_full_disk(work, tokens * (kind.itemsize + chats) + documents * 20)
    with tqdm(desc="writing shards", total=tokens, disable=None, delay=1, leave=False, bar_format=_BAR) as bar:
        units = (work / "units" / name for name in records)
        shards, largest = write_shards(units, whole, kind, plan["tokens of a shard"], chats, bar.update)
    if plan["best fit"]:
        from titanlite.data.packing import pack_file

        for shard in shards:
            pack_file(whole / shard["name"], plan["best fit"], whole / f"{shard['name']}.best_fit-{plan['best fit']}.npy")
    if skipped:
        lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in skipped)
        (whole / "skipped.jsonl").write_text(lines, encoding="utf-8")
    sync_contents(whole)
    manifest = {
        "format": _FORMAT,
        "tokenizer": plan["tokenizer"],
        "vocabulary": tokenizer.vocabulary,
        "largest_id": largest,
        "end_of_text": plan["end of text"],
        "documents": documents,
        "tokens": tokens,
        "chats": chats,
        "shards": shards,
        "inputs": _count_inputs(inputs, records),
        "skipped": len(skipped),
        "fingerprint": _fingerprint(plan["tokenizer"], shards),
    }
    _write_at_once(whole / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


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


def _fingerprint(tokenizer: str, shards: list[dict[str, Any]]) -> str:
    digest = hashlib.blake2b(tokenizer.encode(), digest_size=16)
    for shard in shards:
        digest.update(f" {shard['bin']} {shard['lengths']} {shard['loss']}".encode())
    return digest.hexdigest()


def _first(skipped: list[dict[str, Any]]) -> str:
    return f"{skipped[0]['file']}: {skipped[0]['reason']}"


def _hand_over(work: Path, output: Path) -> dict[str, Any]:
    """Renames whole/ to OUTPUT and removes what else there was; killed within, it is called again."""
    shutil.rmtree(work / "units", ignore_errors=True)
    manifest = json.loads((work / "whole" / "manifest.json").read_text(encoding="utf-8"))
    (work / "whole").rename(output)
    sync(output.parent)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


# --------------------------------------------------------------------------------------------------------------- files


def _refuse_existing(output: Path, work: Path) -> None:
    if output.exists():
        if (work / "plan.json").exists() and not (work / "units").exists() and not (work / "whole").exists():
            shutil.rmtree(work, ignore_errors=True)  # its command was killed between its last two lines
        raise UserError(f"{output}: exists already; name another folder, or remove it")


def _refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: its disk has {free / 1e9:.1f} GB free, and the shards will take {needed / 1e9:.1f} GB; make room: "
            "what is tokenized is kept, and the same command goes on with it"
        )


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    with open(work / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{work}: another command is at work in it") from None
        yield


def _write_at_once(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)
