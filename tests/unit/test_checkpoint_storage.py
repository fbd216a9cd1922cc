"""No code from data: a forged checkpoint runs no code, the file is named, and every changed byte is detected."""

import copy
import io
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.checkpoint import load, manifest, storage
from titanlite.checkpoint.manifest import Damaged, FileDigest, Manifest
from titanlite.checkpoint.save import Saver
from titanlite.checkpoint.storage import METADATA, read_metadata
from titanlite.config.operation import Checkpoint
from titanlite.ground.errors import UserError
from titanlite.tools.checkpoint import LINES, print_each

pytestmark = pytest.mark.usefixtures("group_of_file")
NUMBERS = {"samples": 8, "global_batch": 8, "data": {}, "config": {}, "architecture": {}}
DATA = "__0_0.distcp"


def sample() -> dict[str, Tensor]:
    return {"model.weight": torch.arange(12.0).reshape(3, 4), "model.bias": torch.arange(3.0), "scale": torch.tensor(2.0)}


def write(folder: Path, step: int, tensors: dict[str, Tensor]) -> Path:
    saver = Saver(folder, Checkpoint(enable=True), 60)
    saver.save(step, tensors, NUMBERS)
    saver.finish()
    return folder / f"step-{step:08d}"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A folder with a checkpoint of `sample` at step 10, and one of other values at step 5."""
    folder = tmp_path_factory.mktemp("original")
    write(folder, 5, {name: -tensor for name, tensor in sample().items()})
    write(folder, 10, sample())
    return folder


@pytest.fixture
def source(original, tmp_path) -> Path:
    """A copy of the checkpoint of step 10, next to one of step 5, for forging."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path / "step-00000010"


def read(source: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, as a run reads them."""
    tensors = {name: torch.full_like(tensor, 7) for name, tensor in sample().items()}
    load.load_tensors(source, load.verified(source), tensors)
    return tensors


def put(source: Path, name: str, contents: bytes, forged: bool = True) -> None:
    """Replaces the contents of a file; forged: with a matching manifest."""
    found = manifest.read(source)
    (source / name).write_bytes(contents)
    if forged and name != manifest.FILE:
        here = FileDigest(len(contents), manifest.checksum(source / name))
        manifest.write(source, Manifest(found.numbers, found.files | {name: here}))


def metadata_of(source: Path) -> Metadata:
    return read_metadata(source, manifest.read(source).files)


def saved(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


# ----------------------------------------------------------------------------------------------------- what is admitted


class Recording(storage._Unpickler):
    """Records the names that it must find."""

    asked: set[tuple[str, str]]

    def find_class(self, module: str, name: str) -> Any:
        self.asked.add((module, name))
        return super().find_class(module, name)


def test_only_names_that_a_real_checkpoint_needs_are_admitted(tmp_path):
    mesh = init_device_mesh("cpu", (1,))
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
    tensors: dict[str, Tensor] = {str(kind): torch.ones(2, dtype=kind) for kind in kinds}
    tensors |= {"sharded": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]), "number": torch.tensor(1.0)}
    path = write(tmp_path, 1, tensors) / METADATA
    reading = Recording(io.BytesIO(path.read_bytes()))
    reading.asked = set()
    found = reading.load()
    assert {entry.properties.dtype for entry in found.state_dict_metadata.values()} == set(kinds)
    assert reading.asked == storage._ADMITTED | {("torch", str(kind).removeprefix("torch.")) for kind in kinds}


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls something with a text, in the newest protocol."""
    name_of, found, called = b"\x8c", b"\x93", b"\x85R."
    words = [name_of + bytes([len(word)]) + word.encode() for word in (module, name, argument)]
    return b"\x80\x04" + words[0] + words[1] + found + words[2] + called


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "getattr"),
        ("torch.serialization", "os.system"),  # a dotted name reaches what the module has imported
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
    ],
)
def test_metadata_with_any_other_name_is_refused_with_that_name(source, module, name):
    put(source, METADATA, call(module, name, "true"))
    with pytest.raises(Damaged) as raised:
        load.verified(source)
    assert f"{source / METADATA}: is refused: it references {module}.{name}, " in str(raised.value)


def test_metadata_in_an_old_protocol_is_refused_with_its_opcode(source):
    put(source, METADATA, b"cos\nsystem\n(Vtrue\ntR.")
    with pytest.raises(Damaged, match="is refused: it has the opcode GLOBAL, "):
        load.verified(source)


# --------------------------------------------------------------------------------------------------- code in every file


class Evil:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch '{self.mark}'",)


def in_metadata(field: str) -> Callable[[Path, Evil], bytes]:
    """The code inside of otherwise valid metadata."""

    def forge(source: Path, evil: Evil) -> bytes:
        found = metadata_of(source)
        if field == "tensors":
            found.state_dict_metadata["model.weight"] = evil
        elif field == "storage":
            found.storage_data[MetadataIndex("more")] = evil
        else:
            setattr(found, field, evil)
        return pickle.dumps(found)

    return forge


WAYS: dict[str, Callable[[Path, Evil], bytes]] = {
    "pickle": lambda source, evil: pickle.dumps(evil),
    "torch.save, beside a tensor": lambda source, evil: saved({"weight": torch.ones(3, 4), "more": evil}),
    **{f"metadata, {field}": in_metadata(field) for field in ("tensors", "storage", "planner_data")},
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("name", "forged"),
    [(METADATA, False), (METADATA, True), (DATA, False), (DATA, True), (manifest.FILE, False)],
    ids=["metadata", "metadata, manifest rewritten", "data", "data, manifest rewritten", "manifest"],
)
@pytest.mark.parametrize("way", WAYS)
def test_code_in_a_file_is_not_run_and_the_file_is_named(source, tmp_path, way, name, forged):
    evil = WAYS[way](source, Evil(tmp_path / "was here"))
    if name == DATA and forged:  # whoever can do that controls every tensor anyway
        found = metadata_of(source)
        for number, place in enumerate(found.storage_data.values()):
            place.offset, place.length = number * len(evil), len(evil)
        put(source, DATA, evil * len(found.storage_data))
        put(source, METADATA, pickle.dumps(found))
    else:
        put(source, name, evil, forged)
    with pytest.raises(Damaged) as raised:
        read(source)
    assert not (tmp_path / "was here").exists()
    assert any(line.startswith(f"{source / name}: is ") for line in str(raised.value).splitlines()), raised.value
    assert "Traceback" not in str(raised.value) and "weights_only" not in str(raised.value)


def test_code_that_replaces_a_file_after_its_check_is_not_run(source, tmp_path):
    """Loading reads the metadata a second time."""
    found = load.verified(source)
    put(source, METADATA, pickle.dumps(Evil(tmp_path / "was here")))
    with pytest.raises(Damaged, match="is refused: it references"):
        load.load_tensors(source, found, sample())
    assert not (tmp_path / "was here").exists()


# --------------------------------------------------------------------------------------------------- metadata that lies


def weight(found: Metadata) -> Any:
    return next(place for index, place in found.storage_data.items() if index.fqn == "model.weight")


def change(**values: Any) -> Callable[[Metadata, Path], None]:
    def lie(found: Metadata, source: Path) -> None:
        for name, value in values.items():
            setattr(weight(found), name, value)

    return lie


def entry(value: Any) -> Callable[[Metadata, Path], None]:
    return lambda found, source: found.state_dict_metadata.update({"model.weight": value})


# changes of valid metadata, and the messages
LIES: dict[str, tuple[Callable[[Metadata, Path], Any], str]] = {
    "another checkpoint's file": (change(relative_path=f"../step-00000005/{DATA}"), "the manifest does not list"),
    "beyond the end by one": (
        lambda found, source: change(length=(source / DATA).stat().st_size - weight(found).offset + 1)(found, source),
        "is in bytes",
    ),
    "text for a place": (change(offset="0"), "is refused: "),
    "transformed": (change(transform_descriptors=["zstd"]), "is transformed by ['zstd']"),
    "bytes": (entry(BytesStorageMetadata()), "BytesStorageMetadata, which no titanlite checkpoint"),
    "a place of no name": (lambda found, _: found.storage_data.update({"a": copy.copy(weight(found))}), "has no location"),
    "no tensors": (lambda found, source: setattr(found, "state_dict_metadata", None), "is not the metadata of a checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_false_metadata_is_refused_before_any_tensor_is_read(source, lie):
    found = metadata_of(source)
    LIES[lie][0](found, source)
    put(source, METADATA, pickle.dumps(found))
    with pytest.raises(Damaged) as raised:
        load.verified(source)
    assert str(raised.value).startswith(f"{source / METADATA}: is refused: ") and LIES[lie][1] in str(raised.value)


@pytest.mark.parametrize("name", ["/dev/zero", f"../step-00000005/{DATA}", "..", "", "a\0b"])
def test_a_manifest_that_lists_files_outside_the_checkpoint_is_refused_before_they_are_opened(source, name):
    found = manifest.read(source)
    manifest.write(source, Manifest(found.numbers, found.files | {name: FileDigest(0, "")}))
    with pytest.raises(Damaged, match="is not the name of a file in this folder"):
        load.verified(source)


# -------------------------------------------------------------------------------------------- files that hold no tensor


@pytest.mark.parametrize(
    ("value", "zipped"),
    [({"model.weight": torch.ones(3, 4)}, True), ("text", True), (torch.ones(4), True), (torch.ones(4), False)],
)
def test_a_stored_tensor_that_differs_from_its_metadata_is_refused(source, value, zipped):
    contents = saved(value, zipped)
    found = metadata_of(source)
    whole = (source / DATA).read_bytes()
    weight(found).offset, weight(found).length = len(whole), len(contents)
    put(source, DATA, whole + contents)
    put(source, METADATA, pickle.dumps(found))
    with pytest.raises(Damaged, match="is refused: ") as raised:
        read(source)
    assert str(raised.value).startswith(f"{source / DATA}: is refused: ")


# --------------------------------------------------------------------------------------------------------- the manifest


ENTRIES: dict[str, Any] = NUMBERS | {"step": 100, "config": {"training": {"max_norm": math.inf}}}
FILES = {".metadata": FileDigest(5310, "8f" * 16), "__0_0.distcp": FileDigest(0, "a0" * 16)}


@pytest.fixture
def written(tmp_path) -> bytes:
    """The manifest that `write` makes from ENTRIES and FILES; the file is in tmp_path."""
    manifest.write(tmp_path, Manifest(ENTRIES, FILES))
    return (tmp_path / manifest.FILE).read_bytes()


# --------------------------------------------------------------------------------------------------------------- damage

# Single bits, a whole byte, and the change of one kind of line end into the other.
PATTERNS = [0x01, 0x20, 0x80, 0xFF, 0x07]


def test_every_changed_byte_is_detected(tmp_path, written):
    path, unseen = tmp_path / manifest.FILE, []
    with open(path, "r+b", buffering=0) as file:
        for place, byte in enumerate(written):
            for changed in (byte ^ pattern for pattern in PATTERNS):
                os.pwrite(file.fileno(), bytes([changed]), place)
                try:
                    manifest.read(tmp_path)
                    unseen.append((place, chr(byte), chr(changed)))
                except Damaged as error:
                    assert str(error).startswith(f"{path}: is damaged: ")
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert unseen == []
    assert manifest.read(tmp_path) == Manifest(ENTRIES, FILES)


# ------------------------------------------------------------------------- whole, and not what this version has written


def test_another_format_is_not_reported_as_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_FORMAT", 4)
    manifest.write(tmp_path, Manifest({"step": 1, "of the future": 2}, {}))
    monkeypatch.undo()
    with pytest.raises(UserError, match="this version reads format 3") as raised:
        manifest.read(tmp_path)
    assert not isinstance(raised.value, Damaged)


def test_a_manifest_without_a_number_that_a_run_needs_is_refused_by_its_name(tmp_path):
    for name in ENTRIES:
        manifest.write(tmp_path, Manifest({key: value for key, value in ENTRIES.items() if key != name}, FILES))
        with pytest.raises(Damaged, match=f"has no {name}"):
            manifest.read(tmp_path)


# --------------------------------------------------------------------------------------------------------------- a file


def test_a_file_is_compared_by_size_and_checksum(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 20_000)  # larger than one read
    contents = FileDigest(5_120_000, xxhash.xxh3_128_hexdigest(path.read_bytes()))
    assert manifest.fault(tmp_path, "file", contents) == ""
    assert manifest.fault(tmp_path, "file", contents._replace(bytes=5_120_001)) == (
        f"{path}: is damaged: it has 5,120,000 bytes, and 5,120,001 were written"
    )
    with open(path, "r+b") as file:
        file.seek(5_000_000)
        file.write(b"\x41")
    assert f"{path}: is damaged: its checksum is " in manifest.fault(tmp_path, "file", contents)
    path.unlink()
    assert manifest.fault(tmp_path, "file", contents) == f"{path}: is missing"
    path.mkdir()
    size = path.stat().st_size
    assert f"{path}: cannot be read: " in manifest.fault(tmp_path, "file", contents._replace(bytes=size))


def test_the_command_names_every_damaged_file_and_one_damaged_checkpoint_is_a_failure(tmp_path, written, capsys):
    assert print_each([tmp_path], LINES["verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"{tmp_path / name}: is missing" for name in FILES)


def test_a_checkpoint_that_a_run_has_deleted_before_its_turn_is_no_damage(tmp_path, capsys):
    assert print_each([tmp_path / "step-00000001"], LINES["verify"]) == 0
    assert "deleted meanwhile" in capsys.readouterr().out
