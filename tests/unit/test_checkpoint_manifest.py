"""The manifest of a checkpoint: numbers come back as they were, and no change of a byte passes for what was written."""

import math
import os
from typing import Any

import pytest
import xxhash

from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import Damaged, FileDigest, Manifest
from titanlite.ground.errors import UserError
from titanlite.tools.checkpoint import verify

NUMBERS: dict[str, Any] = {
    "step": 100,
    "samples": 800,
    "global_batch": 8,
    "data": {"tokenizer": "8f0e", "sources": []},
    "config": {"training": {"max_norm": math.inf}},
    "architecture": {"dim": 64},
}
FILES = {".metadata": FileDigest(5310, "8f" * 16), "__0_0.distcp": FileDigest(0, "a0" * 16)}


@pytest.fixture
def written(tmp_path) -> bytes:
    """What `write` has made of NUMBERS and FILES; the file is in tmp_path."""
    manifest.write(tmp_path, Manifest(NUMBERS, FILES))
    return (tmp_path / manifest.FILE).read_bytes()


# ------------------------------------------------------------------------------------------------------------------- damage

# Every single bit, pairs, a whole byte, and what makes of one line end the other kind.
PATTERNS = [*(1 << bit for bit in range(8)), 0x03, 0xFF, 0x07, 0xAA]


def test_every_byte_that_is_not_what_was_written_is_seen(tmp_path, written):
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
    assert manifest.read(tmp_path) == Manifest(NUMBERS, FILES)


# ------------------------------------------------------------------------------- whole, and not what this version has written


def test_another_format_is_told_as_such_and_not_as_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_FORMAT", 4)
    manifest.write(tmp_path, Manifest({"step": 1, "of the future": 2}, {}))
    monkeypatch.undo()
    with pytest.raises(UserError, match="this version reads format 3") as raised:
        manifest.read(tmp_path)
    assert not isinstance(raised.value, Damaged)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_manifest_without_a_number_that_a_run_needs_is_refused_by_its_name(tmp_path, name):
    manifest.write(tmp_path, Manifest({key: value for key, value in NUMBERS.items() if key != name}, FILES))
    with pytest.raises(Damaged, match=f"has no {name}"):
        manifest.read(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- a file


def test_a_file_is_compared_by_size_and_checksum(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 20_000)  # more than one read's worth
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
    assert verify([tmp_path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"{tmp_path / name}: is missing" for name in FILES)
