"""A file's blocks have checksums, and each process verifies what it reads."""

import pickle

import numpy as np
import pytest

from titanlite.data import blocks
from titanlite.data.blocks import BLOCK, Array, BlockFile
from titanlite.data.prepare.sums import BlockWriter
from titanlite.ground.errors import UserError


@pytest.fixture
def written(tmp_path) -> np.ndarray:
    """The numbers of a file of two blocks and a half, written in pieces that end inside of blocks."""
    values = np.random.default_rng(0).integers(0, 2**16, 5 * BLOCK // 4, dtype=np.uint16)
    with BlockWriter(tmp_path / "a.bin") as file:
        for piece in np.array_split(values, 7):
            file.write(piece.data)
    return values


def _array(tmp_path, written: np.ndarray) -> Array:
    return Array(BlockFile(tmp_path / "a.bin", written.nbytes), written.dtype, 0, len(written))


def _flip(tmp_path, at: int) -> None:
    with open(tmp_path / "a.bin", "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_block_is_named_when_it_is_read_and_only_then(tmp_path, written, number):
    _flip(tmp_path, number * BLOCK + 5)
    array = _array(tmp_path, written)
    for other in {0, 1, 2} - {number}:
        array[other * BLOCK // 2 : other * BLOCK // 2 + 10]
    with pytest.raises(UserError, match=rf"a\.bin: is damaged: block {number}, bytes {number * BLOCK:,} to "):
        array[number * BLOCK // 2 + 100 : number * BLOCK // 2 + 101]


def test_a_block_in_the_middle_of_a_long_slice_is_verified(tmp_path, written):
    assert np.array_equal(_array(tmp_path, written)[:], written)
    _flip(tmp_path, BLOCK + 5)
    array = _array(tmp_path, written)
    array[0:1], array[BLOCK : BLOCK + 1]
    with pytest.raises(UserError, match="block 1"):
        array[0 : BLOCK + 1]


def test_each_process_verifies_a_block_once(tmp_path, written, monkeypatch):
    array, reads, pread = _array(tmp_path, written), [], blocks.os.pread
    monkeypatch.setattr(blocks.os, "pread", lambda *about: reads.append(about[2]) or pread(*about))
    for _ in range(3):
        array[:]
    assert reads == [0, BLOCK, 2 * BLOCK]
    pickle.loads(pickle.dumps(array))[:]  # another process knows nothing of what this one has read
    assert reads == 2 * [0, BLOCK, 2 * BLOCK]


def test_slices_of_a_file_are_those_of_a_plain_array_once_all_of_it_is_verified(tmp_path, written):
    array = _array(tmp_path, written)
    assert array.checked() is array
    _ = array[0:1], array[BLOCK : BLOCK + 1]
    assert array.checked() is array
    _ = array[BLOCK // 2 : BLOCK // 2 + 1]
    assert array.checked() is array.numbers
    assert isinstance(pickle.loads(pickle.dumps(array)).checked(), Array)


def test_a_file_that_could_not_be_completed_has_no_checksums(tmp_path):
    with pytest.raises(RuntimeError), BlockWriter(tmp_path / "a.bin") as file:
        file.write(b"half")
        raise RuntimeError
    assert not BlockFile(tmp_path / "a.bin", 4).has_sums
