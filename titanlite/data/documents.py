"""Where text comes from: the standard library's sources, or the user's text and .jsonl files."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titanlite.errors import UserError

STDLIB = "stdlib"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def list_files(dataset: str, dataset_path: str, section: str = "training") -> list[Path]:
    """The files of a section's `dataset` and `dataset_path`, sorted. Raises UserError where there are none."""
    if dataset_path and dataset != STDLIB:
        raise UserError(
            f"{section}.dataset = {dataset!r} and {section}.dataset_path = {dataset_path!r} both name data; give one of them"
        )
    if not dataset_path and dataset == STDLIB:
        return _stdlib_files()
    key = f"{section}.dataset_path" if dataset_path else f"{section}.dataset"
    path = Path(dataset_path or dataset)
    if path.is_file():
        return [path]
    if not path.is_dir():
        hint = "" if dataset_path else f'; the built-in data is called "{STDLIB}"'
        raise UserError(f'{key} = "{path}": no such file or folder{hint}')
    # hidden folders too: a clone brings .git, a download .cache
    visible = (file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts))
    files = sorted(file for file in visible if file.is_file())
    if not files:
        raise UserError(f'{key} = "{path}": the folder holds no files')
    return files


def read_documents(files: list[Path]) -> Iterator[str]:
    """The text of each document, in order: a whole file, or the "text" of each line of a .jsonl file.

    Raises UserError that names the file, and in a .jsonl file the line, for text that is not UTF-8 and for lines that are
    not JSON objects with a text.
    """
    for file in files:
        try:
            if file.suffix == ".jsonl":
                yield from _jsonl_texts(file)
            else:
                yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 text: {error}") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None


def _jsonl_texts(file: Path) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{file}, line {number}: not UTF-8 text: {error}") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{file}, line {number}: not JSON: {error}") from None
            if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
                raise UserError(f'{file}, line {number}: must be an object with a string under "text"')
            try:
                entry["text"].encode("utf-8")
            except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, no tokenizer can read it
                raise UserError(f"{file}, line {number}: not Unicode text: {error}") from None
            yield entry["text"]


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    inside = ((file, file.relative_to(root).parts) for file in root.rglob("*.py"))
    # lib2to3 and others keep samples in odd encodings under tests, which are left out; all else is UTF-8
    return sorted(file for file, parts in inside if not _LEFT_OUT.intersection(parts))
