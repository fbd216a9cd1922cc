"""Lists the inputs, and splits them into parts that are read in parallel."""

import glob
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from titanlite.data.prepare.manifest import MANIFEST
from titanlite.data.prepare.open_files import is_url, need, open_bytes, packing_of, plain_name
from titanlite.data.prepare.readers import HUB, InputRange, kind_of, known_kinds, open_dataset, open_hub
from titanlite.ground.errors import UserError, listed
from titanlite.ground.files import split
from titanlite.ground.untrusted import MIB, FileSchema, read_json, size_of

STDLIB = "stdlib"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SMALLEST, _LARGEST = MIB // 2, 32 * MIB  # bytes of a unit of work
_UNITS = 128  # the number of units for a small input, so that every worker gets several
# files about the data
_ABOUT = {"readme", "license", "licence", "copying", "notice", "dataset_dict", "dataset_info", "dataset_infos"}
_NAMED_AT_MOST = 50  # files left out that one message names
# What fsspec's file systems call the version of a file: checksums (HTTP, S3, Hugging Face, GitHub), then times.
_STAMPS = (
    *("ETag", "etag", "Content-MD5", "Digest", "blob_id", "xet_hash", "sha"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "modificationTime", "modify", "created"),
)


class Input(NamedTuple):
    """A file, URL or dataset with documents."""

    path: str  # absolute for a local file
    size: int | None  # approximate bytes; None for a URL that does not say
    stamp: str  # differs when the input has changed: modification time, version or fingerprint; "" for a URL that gives none
    parts: list[InputRange]


def list_inputs(names: list[str], key: str = "--input", warn: Callable[[str], object] = lambda _: None) -> list[Input]:
    """The inputs to which files, folders, patterns, URLs and names of datasets refer, in order; those of one name sorted.

    A folder means all files under it that are not hidden, a pattern the files that match, a name with "://" what fsspec finds
    there. From folders and patterns, files of unknown kinds and files about the data, such as a README, are left out. A folder
    that `save_to_disk` wrote is a dataset. hub:NAME[:CONFIG] or hub:NAME:[CONFIG]:SPLIT is a dataset of the Hugging Face hub or
    in a local folder NAME; the default split is train. "stdlib" means `stdlib_files`.

    key: the option or key that has the names. warn: called with a message that names the files left out. Raises UserError for a
    name without inputs, for a file of an unknown kind, and for an input named twice.
    """
    sources = [entry for name in names for entry in _find(name, key, warn)]
    seen: set[str] = set()
    for path, _, _, _ in sources:
        if path.encode("utf-8", "replace").decode() != path:
            raise UserError(f"{key}: {path!a}: its name is not in UTF-8, as the manifest of the output is; rename it")
        if path in seen:
            raise UserError(f"{key}: {path} is named twice; its documents would be in the data twice")
        seen.add(path)
    target = unit_size(sum(size or 0 for _, _, size, _ in sources))
    return [Input(path, size, stamp, list(_split(path, kind, size, target))) for path, kind, size, stamp in sources]


def unit_size(total: int) -> int:
    """Bytes of a unit of work, for `total` bytes of input."""
    return min(max(total // _UNITS, _SMALLEST), _LARGEST)


def group(parts: list[InputRange]) -> list[list[InputRange]]:
    """Units of work: consecutive parts, together not much larger than `unit_size`."""
    return split(parts, lambda part: part.size, unit_size(sum(part.size for part in parts)))


def stdlib_files() -> list[Path]:
    """The source files of the running Python's standard library, sorted."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # lib2to3 and others keep samples in other encodings under tests; site-packages is not the standard library
        folders[:] = set(folders) - _LEFT_OUT
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


# ------------------------------------------------------------------------------------------------------------- finding

_Entry = tuple[str, str, int | None, str]  # path, kind, size, stamp


def _find(name: str, key: str, warn: Callable[[str], object]) -> list[_Entry]:
    if name.startswith(HUB):
        return [_find_hub(name)]
    if is_url(name):
        return _find_urls(name, key, warn)
    path = os.path.abspath(name)
    if name == STDLIB and not os.path.exists(path):
        return [_find_file(str(file)) for file in stdlib_files()]
    try:
        if os.path.isdir(path):
            return _find_in_folder(Path(path), key, warn)
        if os.path.exists(path):
            _refuse_unknown(path, key)
            return [_find_file(path)]
        # the name alone is a pattern: the working folder may have brackets in its own
        pattern = os.path.normpath(os.path.join(glob.escape(os.getcwd()), name))
        matches, links = _matches(pattern) if glob.has_magic(name) else (set(), set())  # not a link that leads nowhere
        datasets = {match for match in matches if _is_dataset(match)}
        # a folder among them is not walked: it is left out by name, except where "**" matches what is in it too
        files = matches - datasets - {os.path.dirname(match) for match in matches}
        chosen = datasets.union(_known([*files, *links], name, key, warn, bool(datasets)))
        inputs = [_find_dataset(match) if match in datasets else _find_file(match) for match in sorted(chosen)]
    except OSError as error:
        raise UserError(f"{key} {name}: {error.filename} cannot be read: {error.strerror}") from None
    if not inputs:
        on_hub = f"hub:{name}" if re.fullmatch(r"[\w-]+/[\w.-]+", name) else "hub:allenai/c4:en"
        absent = f'no such file or folder; "{STDLIB}" is the built-in data, "{on_hub}" a dataset of the Hugging Face hub'
        raise UserError(f'{key} "{name}": {"no file matches this pattern" if glob.has_magic(name) else absent}')
    return inputs


def _refuse_unknown(path: str, key: str) -> None:
    if not kind_of(path):
        raise UserError(f'{key} "{path}": unknown suffix; {known_kinds()}')


def _is_data(path: str) -> bool:
    """Whether a file of a folder has documents, by its name: of a known kind, and not about the data."""
    return kind_of(path) is not None and plain_name(path).rpartition("/")[2].partition(".")[0] not in _ABOUT


def _known(files: list[str], name: str, key: str, warn: Callable[[str], object], others: bool = False) -> list[str]:
    """The files of a folder or pattern that are data; `warn` gets the names of the rest. others: more inputs exist."""
    known = [file for file in files if _is_data(file) and not os.path.isdir(file)]
    for file in known:
        above, last = os.path.split(file)
        if last == MANIFEST and glob.glob(f"{glob.escape(above)}/*.idx"):
            remedy = "name each such folder by itself, as a table of [[training.sources]]"
            if key == "--input":
                remedy = "leave it out: name the files of the text, or a pattern such as folder/*.jsonl"
            raise UserError(f'{key} "{name}": {above} holds token files, not text; {remedy}')
    left_out = sorted(set(files) - set(known))
    if more := left_out[_NAMED_AT_MOST:]:
        left_out[_NAMED_AT_MOST:] = [f"and {len(more)} more"]
    if left_out and not known and not others:
        raise UserError(listed(f'{key} "{name}": has no file of a known kind:', left_out, known_kinds()))
    if left_out:
        warn(listed(f'{key} "{name}": left out: folders, links to them, unknown kinds, files about the data:', left_out))
    return known


def _find_in_folder(path: Path, key: str, warn: Callable[[str], object]) -> list[_Entry]:
    if _is_dataset(str(path)):
        return [_find_dataset(str(path))]
    if saved := sorted(folder.name for folder in path.iterdir() if _is_dataset(str(folder))):  # the splits of one, or several
        raise UserError(f"{key} {path}: holds the datasets {', '.join(saved)}; name one, such as {path / saved[0]}")
    # a link to a folder is not followed, and one may lead nowhere: they are left out by name, or refused
    found = [Path(each) for _, links, files in _walk(str(path)) for each in (*links, *files)]
    files = [str(file) for file in sorted(found) if file.is_file() or file.is_symlink()]
    if not files:
        raise UserError(f"{key} {path}: the folder has no files")
    return [_find_file(file) for file in _known(files, str(path), key, warn)]


def _matches(pattern: str) -> tuple[set[str], set[str]]:
    """(what a pattern matches, the links to folders that its `**` does not follow: files would have several names)."""
    head, recursive, rest = f"{pattern}/".partition("/**/")
    if not recursive:
        return set(glob.glob(pattern)), set()
    found, links = set[str](), set[str]()
    for root in filter(os.path.isdir, glob.glob(f"{head}/")):
        for folder, linked, _ in _walk(root):
            inner, further = _matches(os.path.join(glob.escape(folder), rest.rstrip("/") or "*"))
            found |= inner
            links |= further.union(linked)
    return found - links, links


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(a folder, its links to folders, its files), for a folder and all below it, without hidden ones: a clone brings .git, a
    download .cache.

    Raises OSError for a folder that cannot be read: a part of the data would be missing, and nothing would say so.
    """
    for above, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [os.path.join(above, name) for name in names if not name.startswith(".")]
        yield above, [path for name in folders if os.path.islink(path := os.path.join(above, name))], files


def _raise(error: OSError) -> None:
    raise error


def _find_file(path: str) -> _Entry:
    return path, _kind(path), size_of(path), str(os.stat(path).st_mtime_ns)


def _kind(path: str) -> str:
    """The reader of a file. Raises UserError now, before any work, where the package that it needs is missing."""
    kind = kind_of(path)
    assert kind is not None
    if kind == "parquet" or packing_of(path) == ".zst":
        need("pyarrow" if kind == "parquet" else "zstandard", path)
    return kind


def _is_dataset(folder: str) -> bool:
    return all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json"))


class _State(FileSchema):
    """The schema of state.json in a saved dataset."""

    fingerprint: str = Field(alias="_fingerprint")


def _find_dataset(folder: str) -> _Entry:
    files = sorted(Path(folder).glob("*.arrow"))
    times = [file.stat().st_mtime_ns for file in files]
    stamp = f"{read_json(Path(folder, 'state.json'), _State, 64 * MIB)['_fingerprint']} {max(times, default=0)}"
    return folder, "dataset", sum(file.stat().st_size for file in files), stamp


def _find_hub(name: str) -> _Entry:
    stream, version = open_hub(name)
    return name, "hub", stream.info.dataset_size or stream.num_shards * _LARGEST, version


def _find_urls(name: str, key: str, warn: Callable[[str], object]) -> list[_Entry]:
    fsspec = need("fsspec", f"{key} {name}")
    try:
        system, path = fsspec.core.url_to_fs(name)
        if "*" in path or "[" in path:
            matches = sorted(system.unstrip_protocol(match) for match in system.glob(path) if system.isfile(match))
            names = _known(matches, name, key, warn)
        else:
            _refuse_unknown(name, key)
            names = [name] if system.exists(path) else []
        inputs = [_find_url(system, url) for url in names]
    except UserError:
        raise
    except Exception as error:  # each file system raises its own classes
        raise UserError(f"{key} {name}: cannot be listed: {type(error).__name__}: {error}") from None
    if not inputs:
        raise UserError(f"{key} {name}: not found")
    return inputs


def _find_url(system: Any, url: str) -> _Entry:
    info = system.info(system._strip_protocol(url))
    stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), "")
    return url, _kind(url), info.get("size"), stamp


# ----------------------------------------------------------------------------------------------------------- splitting


def _split(path: str, kind: str, size: int | None, target: int) -> Iterator[InputRange]:
    about = target if size is None else size
    if packing_of(path) or kind not in _SPLITTERS:  # no reader can begin in the middle of a compressed file
        yield InputRange(path, kind, 0, 0, about)
    elif kind == "jsonl" and size is None:
        yield InputRange(path, kind, 0, sys.maxsize, target)
    else:
        yield from _SPLITTERS[kind](path, about, target)


def _split_lines(path: str, size: int, target: int) -> Iterator[InputRange]:
    for begin in range(0, size, target):
        end = min(begin + target, size)
        yield InputRange(path, "jsonl", begin, end, end - begin)


def _split_row_groups(path: str, size: int, target: int) -> Iterator[InputRange]:
    parquet = need("pyarrow.parquet", path)
    with open_bytes(path) as file:
        try:
            about = parquet.ParquetFile(file).metadata
            sizes = [about.row_group(number).total_byte_size for number in range(about.num_row_groups)]
        except Exception:  # damage, or what a file system raises: the reader will report the fault
            yield InputRange(path, "parquet", 0, 0, size)
            return
    first = total = 0
    for number, one in enumerate(sizes):
        if total and total + one > target:
            yield InputRange(path, "parquet", first, number, total)
            first, total = number, 0
        total += one
    yield InputRange(path, "parquet", first, len(sizes), total)


def _split_rows(path: str, size: int, target: int) -> Iterator[InputRange]:
    rows = len(open_dataset(path))
    step = max(1, rows * target // max(size, 1))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield InputRange(path, "dataset", begin, end, size * (end - begin) // rows)


def _split_shards(path: str, size: int, _target: int) -> Iterator[InputRange]:
    shards = open_hub(path)[0].num_shards
    for number in range(shards):
        yield InputRange(path, "hub", number, number + 1, size // shards)


_SPLITTERS = {"jsonl": _split_lines, "parquet": _split_row_groups, "dataset": _split_rows, "hub": _split_shards}
