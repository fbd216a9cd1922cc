"""Files of text, JSON lines and tables for tests, and the readers' results."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import zstandard

from titanlite.data.prepare.documents import list_inputs
from titanlite.data.prepare.readers import Bad, Document, describe_location, read, where

TEXTS = ["def add(a, b):\n    return a + b\n", "naïve café, 数学, 🙂\r\n\ttabs\n", "", "x = 1\n" * 20]
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def write_packed(path: Path, content: bytes) -> Path:
    """A file that is compressed according to its name."""
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, lambda content: content)(content)
    path.write_bytes(packed)
    return path


def write_table(path: Path, rows: int = 1000, **columns: object) -> Path:
    parquet.write_table(pyarrow.table(columns or {"text": [f"row {row}" for row in range(rows)]}), path, row_group_size=300)
    return path


def save_dataset(folder: Path, **columns: list[object]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return folder


def read_all(*names: object, text_key: str = "text") -> list[Document | Bad]:
    parts = [part for entry in list_inputs([str(name) for name in names]) for part in entry.parts]
    return [found for part in parts for found in read(part, text_key)]


def contents(*names: object, text_key: str = "text") -> list[object]:
    found = read_all(*names, text_key=text_key)
    assert all(isinstance(one, Document) for one in found), found
    return [one.content for one in found]


def faults_in(name: object, text_key: str = "text") -> list[tuple[str, str]]:
    """(location as text, reason) of each entry that is not a document, over all parts."""
    return [
        (describe_location(*where(part, found.location)), found.reason)
        for part in list_inputs([str(name)])[0].parts
        for found in read(part, text_key)
        if isinstance(found, Bad)
    ]
