"""DCP's storage on a file system, with checksums on the way out and no trust on the way in.

DCP pickles `.metadata`, which says where in which file each shard is. It is read here through an unpickler that knows only
the classes this takes; tensors are read by DCP with `weights_only`; anything that is not a tensor is refused, since DCP would
unpickle it; and files are opened only by names that the manifest lists.
"""

import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.manifest import Contents, Damaged, fault

METADATA = ".metadata"

# What the metadata of a checkpoint that holds tensors only is made of (PyTorch 2.11 to 2.13), besides the names of dtypes.
_ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


# ------------------------------------------------------------------------------------------------------------------- writing


class _Checked(io.RawIOBase):
    """A file that is written from beginning to end, and the checksum of what was written."""

    def __init__(self, file: io.BufferedWriter):
        self._file, self._digest, self._size = file, xxhash.xxh3_128(), 0
        self.failure: OSError | None = None  # of the disk

    def write(self, data: Any) -> int:
        self._digest.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._size += written
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # DCP syncs through this; what is in Python's buffer would not reach the disk
        return self._file.fileno()

    def contents(self) -> Contents:
        return Contents(self._size, self._digest.hexdigest())


class _CheckedFiles(FileSystem):
    """DCP's file system; `written` has the contents of every file, by name."""

    def __init__(self) -> None:
        self.written: dict[str, Contents] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with open(path, mode) as file:
            checked = _Checked(file)
            try:
                yield checked
            except Exception as error:  # torch.save may cover the disk's with its own: "unexpected pos 704 vs 598"
                raise checked.failure or error from None
            self.written[Path(path).name] = checked.contents()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):
    """What a rank tells the one that commits: of each shard where it is, and of the files what they hold."""

    files: dict[str, Contents] = dataclasses.field(default_factory=dict)


class Writer(FileSystemWriter):
    """Writes a checkpoint's files, reads them back, and on the coordinating rank hands over to `commit`.

    commit: called once all ranks have written, with the contents of every file; if it raises, the save has failed on all ranks.
    staged: whether the tensors are in the CPU's memory already.
    """

    def __init__(self, folder: Path, name: str, commit: Callable[[dict[str, Contents]], None], staged: bool = False):
        # Copying ahead from the GPU, where there is no need, would open a context on GPU 0 in the thread of every rank.
        super().__init__(folder, sync_files=True, **({"per_thread_copy_ahead": 0} if staged else {}))
        self.fs = _CheckedFiles()
        self._name, self._commit = name, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
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
        return StorageMeta(checkpoint_id=self._name)  # the step: no machine's paths, and no two steps' metadata are alike

    def _read_back(self, names: Iterable[str]) -> None:
        """Finds what was lost on the way to the system; what the disk does to it later is found when it is loaded."""
        for name in names:
            if found := fault(Path(self.path), name, self.fs.written[name]):
                raise OSError(found)


# ------------------------------------------------------------------------------------------------------------------- reading


class Reader(FileSystemReader):
    """Reads the tensors of a checkpoint whose files are `files`. Raises Damaged for metadata that could not be ours."""

    def __init__(self, folder: Path, files: dict[str, Contents]):
        super().__init__(folder)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path), self._files)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in by_file.items():
            path = Path(self.path) / file
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except OSError as error:
                raise Damaged(f"{path}: cannot be read: {error}") from None
            except pickle.UnpicklingError:  # whose text advises to give up weights_only
                raise Damaged(f"{path}: is refused: it holds something else than tensors") from None
            except Exception as error:  # what is no tensor, or another one than the metadata says, fails in many ways
                raise Damaged(f"{path}: is refused: {type(error).__name__}: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Unpickler(pickle.Unpickler):
    """Knows few classes. A forged pickle can still give their objects, or themselves, odd values; what is read is checked."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint of ours holds")


def read_metadata(folder: Path, files: dict[str, Contents]) -> Metadata:
    """Where the tensors of a checkpoint are. Raises Damaged where that is not readable, or points out of the checkpoint."""
    path = folder / METADATA
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        what = _metadata_fault(metadata, files)
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything, and so can what a forged one holds
        raise Damaged(f"{path}: is refused: {error}") from None
    if what:
        raise Damaged(f"{path}: is refused: {what}")
    return metadata


def _metadata_fault(metadata: Any, files: dict[str, Contents]) -> str:
    tensors, storage = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(tensors, dict) or not isinstance(storage, dict):
        return "it is not the metadata of a checkpoint"
    for name, entry in tensors.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            return f"{name!r} is not a tensor"
    for index, place in storage.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo):
            return f"{index!r} has no place"
        file, first, length = place.relative_path, place.offset, place.length
        if not isinstance(file, str) or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            return f"{index.fqn} is said to be in {file!r}, outside of the checkpoint"
        if file not in files:
            return f"{index.fqn} is said to be in {file!r}, which the manifest does not list"
        if not (0 <= first <= first + length <= files[file].bytes):
            return f"{index.fqn} is said to be in bytes {first} to {first + length} of {file!r}, which has {files[file].bytes}"
        if place.transform_descriptors:
            return f"{index.fqn} is said to be stored by {place.transform_descriptors}"
    return ""
