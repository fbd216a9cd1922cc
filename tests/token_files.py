"""Token files for tests, and their data without a tokenizer."""

import atexit
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.schema import Config, Source
from titanlite.data.indexed import TokenFile
from titanlite.data.mixture import Data
from titanlite.data.prepare.shards import TokenWriter, smallest_type
from titanlite.data.sources import TokenSource

TEXTS = [f"def add_{n}(a, b):\n    return a + b + {n}\n" * (1 + n % 5) for n in range(40)]


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="titanlite-tokens-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def write_file(
    prefix: Path, documents: Sequence[Any], vocabulary: int = 2**16, losses: Sequence[Any] | None = None
) -> TokenFile:
    """A token file of these documents, each a sequence of ids; losses: for each a sequence of booleans."""
    writer = TokenWriter(prefix, smallest_type(vocabulary), losses is not None)
    for number, document in enumerate(documents):
        writer.write(np.asarray(document, np.int64), None if losses is None else np.asarray(losses[number], bool))
        writer.lengths.append(len(document))
    writer.close()
    return TokenFile(prefix)


def opened(file: TokenFile | list[TokenFile], name: str = "tests", **keys: Any) -> TokenSource:
    """A source of token files; keys: of the configuration's Source."""
    files = file if isinstance(file, list) else [file]
    content = hashlib.blake2b(b"".join(part.ids[:].tobytes() + part.lengths[:].tobytes() for part in files)).hexdigest()
    return TokenSource(Source(path=name, **keys), name, files, content)


def data_of(documents: Sequence[Any], config: Config, vocabulary: int, bytes_a_token: int = 1, losses=None) -> Data:
    """One source of these documents, in a file that is removed with the process."""
    name = hashlib.blake2b(repr([np.asarray(d).tobytes() for d in documents]).encode()).hexdigest()[:24]
    file = write_file(_folder() / name, documents, vocabulary, losses)
    return mix_of([opened(file)], config, vocabulary, bytes_a_token)


def mix_of(sources: list[TokenSource], config: Config, vocabulary: int = 2**16, bytes_a_token: int = 1) -> Data:
    """Data of opened sources, without a tokenizer."""
    return Data(sources, config.training, "no tokenizer", np.full(vocabulary, bytes_a_token), "training.sources")


def documents_of(file: TokenFile) -> list[list[int]]:
    return [file.ids[slice(*file.boundaries(number, number + 1))].tolist() for number in range(file.documents)]


def write_jsonl(path: Path, texts: list[str] = TEXTS) -> Path:
    """One text per line; -> the file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
