"""DCP's storage on a file system, with checksums for what is written and validation of what is read.

DCP pickles `.metadata`, which has the file and offset of each shard. The unpickler here admits only the classes that this
format needs, and opcodes.py only pickles of bounded cost. DCP reads tensors with `weights_only`. Everything else is refused,
because DCP would unpickle it. Only files that the manifest lists are opened.
"""

import dataclasses
import io
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint import opcodes
from titanlite.checkpoint.manifest import Damaged, FileDigest, damage, fault
from titanlite.ground.torch_private import StorageInfo
from titanlite.ground.untrusted import MIB, read_bytes
from titanlite.launch.failure import ran_out

METADATA = ".metadata"
_LIMIT = 16 * 1024 * MIB  # of a model in 10,000 parts: 1 GiB
_SHOWN = 500  # characters of an error, which may show a value of the file

# The classes in the metadata of a checkpoint of tensors (PyTorch 2.11 to 2.13); dtypes are admitted too.
_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
}


# ------------------------------------------------------------------------------------------------------------------- writing


class _Checked(io.BufferedWriter):
    """A file that is written sequentially, with size and checksum of its contents."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(open(path, "wb", buffering=0))
        self.size, self.digest = 0, xxhash.xxh3_128()
        self.failure: OSError | None = None  # the first error of the disk

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size += written
        return written

    def fileno(self) -> int:
        self.flush()  # DCP syncs this descriptor, which does not include Python's buffer
        return super().fileno()


@contextmanager
def checked_file(path: str | os.PathLike) -> Iterator[_Checked]:
    """A new file, which is removed if it stays incomplete. Raises the first error of the disk."""
    with _Checked(path) as file:
        try:
            yield file
        except Exception as error:  # torch.save may replace the error of the disk: "unexpected pos 704 vs 598"
            with suppress(OSError):  # of a disk that takes nothing any more
                os.unlink(path)  # a full disk needs the room
            raise file.failure or error from None


class _CheckedFiles(FileSystem):
    """DCP's file system; `written` has size and checksum of every file by name."""

    def __init__(self) -> None:
        self.written: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with checked_file(path) as file:
            yield file
        name = Path(path).name.removesuffix(".tmp")  # DCP renames .metadata.tmp at the end
        self.written[name] = FileDigest(file.size, file.digest.hexdigest())


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):
    """The result that a rank sends to the coordinator: the location of a shard, and size and checksum of its files."""

    files: dict[str, FileDigest] = dataclasses.field(default_factory=dict)


class Writer(FileSystemWriter):
    """Writes a checkpoint's files, reads them back, and calls `commit` on the coordinator.

    commit: called after all ranks have written, with size and checksum of every file; if it raises, the save fails on all
    ranks. staged: the tensors are already in CPU memory.
    """

    fs: _CheckedFiles

    def __init__(self, folder: Path, name: str, commit: Callable[[dict[str, FileDigest]], None], staged: bool = False):
        # Staged tensors need no copy from the GPU, which would open a context on GPU 0 in the saving thread of every rank.
        options: dict[str, Any] = {"per_thread_copy_ahead": 0} if staged else {}
        super().__init__(folder, sync_files=True, **options)
        self.fs = _CheckedFiles()
        self._name, self._commit = name, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait() if plan.items else []  # it would write an empty file
        self._read_back(self.fs.written)
        done: Future[list[WriteResult]] = Future()
        done.set_result([_Written(**vars(r), files=self.fs.written if n == 0 else {}) for n, r in enumerate(results)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self._read_back([METADATA])
        files = dict(self.fs.written)
        for result in (result for rank in results for result in rank):
            assert isinstance(result, _Written)
            files |= result.files
        self._commit(files)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._name)  # the step: no path of this machine, and unique for each step

    def _read_back(self, names: Iterable[str]) -> None:
        """Detects damage between this process and the file system. Loading detects later damage on the disk."""
        for name in names:
            if damage := fault(Path(self.path), name, self.fs.written[name]):
                raise OSError(damage)


# ------------------------------------------------------------------------------------------------------------------- reading


class _NamedFiles(FileSystem):
    """DCP's file system for reading; what fails while a file is open raises Damaged or Unread with its name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with damage(Path(path)):
            try:
                with super().create_stream(path, mode) as stream:
                    yield stream
            except (OSError, MemoryError):
                raise
            except pickle.UnpicklingError:  # its text recommends weights_only=False
                raise Damaged(f"{path}: is refused: it has something other than tensors") from None
            except Exception as error:  # contents that are no tensor, or do not match the metadata, fail in many ways
                if ran_out(error):
                    raise MemoryError from None
                raise Damaged(f"{path}: is refused: {type(error).__name__}: {error}") from None


class Reader(FileSystemReader):
    """Reads the tensors of a checkpoint that has this metadata, as `read_metadata` returns it."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.fs = _NamedFiles()
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class _Unpickler(pickle.Unpickler):
    """Admits few classes. A forged pickle can still give their objects any values, so `_check_metadata` checks the result."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it references {module}.{name}, which no titanlite checkpoint has")


def read_metadata(folder: Path, files: dict[str, FileDigest]) -> Metadata:
    """The locations of a checkpoint's tensors. Raises Damaged if they are unreadable or outside of the checkpoint."""
    path = folder / METADATA
    with damage(path):
        content = read_bytes(path, _LIMIT)
        try:
            opcodes.check(content)
            metadata = _Unpickler(io.BytesIO(content)).load()
            _check_metadata(metadata, files)
        except MemoryError:
            raise
        except Exception as error:  # a damaged or forged pickle can raise anything
            raise Damaged(f"{path}: is refused: {str(error)[:_SHOWN]}") from None
    return metadata


def tensor_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and dtype of every tensor; `read_metadata` refuses other entries."""
    entries = metadata.state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _check_metadata(metadata: Any, files: dict[str, FileDigest]) -> None:
    """Raises ValueError for anything but tensors whose elements are in these files.

    Damage is found by the checksums, and only whole tensors are written. The elements are counted, because DCP loads those that
    the metadata has, and says nothing of the others.
    """
    tensors, storage = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise ValueError("it is not the metadata of a checkpoint")
    for index, info in storage.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
            raise ValueError(f"{index!r} has no location")
        if info.relative_path not in files:  # whose names have no path
            raise ValueError(f"{index.fqn} is in {info.relative_path!r}, which the manifest does not list")
        first, last, size = info.offset, info.offset + info.length, files[info.relative_path].bytes
        if not 0 <= first <= last <= size:
            raise ValueError(f"{index.fqn} is in bytes {first} to {last} of {info.relative_path!r}, which has {size} bytes")
        if info.transform_descriptors:
            raise ValueError(f"{index.fqn} is transformed by {info.transform_descriptors}")
    for name, entry in tensors.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name!r} is not a tensor")
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in storage:
                raise ValueError(f"{name} has no location of its part at {tuple(chunk.offsets)}")
        held, elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if held != elements:
            raise ValueError(f"{name}: its {len(entry.chunks)} parts hold {held} of {elements} elements")
