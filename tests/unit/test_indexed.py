"""Token files in Megatron-LM's format, as others write and read them, and the checksums of their blocks: never trusted."""

import pickle
import resource
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.token_files import write_file
from titanlite.data.blocks import BLOCK, Array, BlockFile, sums_of
from titanlite.data.indexed import TokenFile, path_of
from titanlite.data.prepare.shards import write_index
from titanlite.data.prepare.sums import write_sums
from titanlite.ground.errors import UserError

_CODES = {1: ("B", 1), 4: ("i", 4), 5: ("q", 8), 8: ("H", 2)}  # of the ids' type -> for struct, bytes an id
_HEADER = 9 + 8 + 1 + 8 + 8

Sequences = list[list[int]]  # of one document


def _megatron_index(documents: list[Sequences], code: int) -> bytes:
    """NAME.idx as Megatron-LM's _IndexWriter writes it, field by field."""
    lengths = [len(sequence) for document in documents for sequence in document]
    pointers, place = [], 0
    for length in lengths:
        pointers.append(place)
        place += length * _CODES[code][1]
    first_sequences = [0]
    for document in documents:
        first_sequences.append(first_sequences[-1] + len(document))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(first_sequences))
    tables = (("i", lengths), ("q", pointers), ("q", first_sequences))
    return head + b"".join(struct.pack(f"<{len(numbers)}{form}", *numbers) for form, numbers in tables)


def _megatron(prefix: Path, documents: list[Sequences], code: int = 8, behind: bytes = b"") -> Path:
    """A pair of files as Megatron-LM writes it; behind: extra bytes at the end of NAME.idx."""
    ids = [token for document in documents for sequence in document for token in sequence]
    path_of(prefix, "bin").write_bytes(struct.pack(f"<{len(ids)}{_CODES[code][0]}", *ids))
    path_of(prefix, "idx").write_bytes(_megatron_index(documents, code) + behind)
    return prefix


def _read(file: TokenFile) -> list[list[int]]:
    """Every document by itself."""
    return [file.ids[slice(*file.boundaries(number, number + 1))].tolist() for number in range(file.documents)]


def _patch(path: Path, at: int, form: str, value: int) -> None:
    """Overwrites one number of a file."""
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, value)
    path.write_bytes(content)


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """NAME.bin and NAME.idx of four documents in five sequences, 14 tokens of two bytes."""
    prefix = _megatron(tmp_path / "a", [[[1, 2, 3]], [[4, 5], [6]], [[7, 8, 9, 10]], [[11, 12, 13, 14]]])
    return path_of(prefix, "bin"), path_of(prefix, "idx")


def _length(sequence: int) -> int:
    return _HEADER + 4 * sequence


def _pointer(sequence: int) -> int:
    return _HEADER + 4 * 5 + 8 * sequence


def _first_sequence(document: int) -> int:
    return _HEADER + (4 + 8) * 5 + 8 * document


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("behind", [b"", bytes(6), b"\x01" * 6], ids=["", "modes 0", "modes 1"])
@pytest.mark.parametrize(("code", "largest"), [(1, 255), (8, 65535), (4, 2**31 - 1), (5, 2**62)])
def test_a_pair_that_another_implementation_wrote_is_read(tmp_path, code, largest, behind):
    documents = [[[1, 2, 3], [4]], [[5, 0]], [[], [largest, 7, 8], []]]
    file = TokenFile(_megatron(tmp_path / "a", documents, code, behind))
    file.document_lengths()
    assert _read(file) == [[1, 2, 3, 4], [5, 0], [largest, 7, 8]]
    assert (file.documents, file.tokens, file.ids.dtype.itemsize) == (3, 9, _CODES[code][1])
    assert file.document_lengths().tolist() == [4, 2, 3]
    assert file.loss is None


@pytest.mark.parametrize("documents", [[], [[]], [[[]], [[]]]], ids=["no documents", "no sequences", "no tokens"])
def test_an_empty_pair_is_read(tmp_path, documents):
    file = TokenFile(_megatron(tmp_path / "a", documents))
    file.document_lengths()
    assert file.tokens == 0
    assert _read(file) == [[] for _ in documents]


def _random_documents(random: np.random.Generator) -> list[Sequences]:
    """Some of them without tokens, some without even a sequence."""
    counts = random.integers(0, 4, random.integers(1, 30))
    return [[random.integers(0, 256, random.integers(0, 4)).tolist() for _ in range(count)] for count in counts]


@pytest.mark.parametrize("code", [1, 8, 5])
@pytest.mark.parametrize("seed", range(4))
def test_boundaries_and_document_at_equal_counting(tmp_path, seed, code):
    documents = _random_documents(np.random.default_rng(seed))
    lengths = [sum(len(sequence) for sequence in document) for document in documents]
    begins = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    file = TokenFile(_megatron(tmp_path / "a", documents, code))
    for first in range(len(documents) + 1):
        for last in range(first, len(documents) + 1):
            assert file.boundaries(first, last).tolist() == begins[first : last + 1]
    holders = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert [file.document_at(place) for place in range(file.tokens)] == holders


# -------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(("vocabulary", "code"), [(256, 1), (257, 8), (65536, 8), (65537, 4), (2**31, 4), (2**31 + 1, 5)])
def test_written_files_equal_those_of_another_implementation_byte_for_byte(tmp_path, vocabulary, code):
    documents = [[1, 2, vocabulary - 1], [], [0], list(range(200))]
    theirs = _megatron(tmp_path / "theirs", [[document] for document in documents], code)
    write_file(tmp_path / "ours", documents, vocabulary)
    for suffix in ("bin", "idx"):
        assert path_of(tmp_path / "ours", suffix).read_bytes() == path_of(theirs, suffix).read_bytes()


def test_offsets_beyond_four_gigabytes_are_written_correctly(tmp_path):
    write_index(tmp_path / "a", np.dtype(np.int32), np.array([2**30, 2**30, 2**30, 5], np.int32))
    content = path_of(tmp_path / "a", "idx").read_bytes()
    assert struct.unpack_from("<4q", content, _HEADER + 4 * 4) == (0, 2**32, 2**33, 3 * 2**32)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (7, "<B", 1, "not an index"),  # the magic bytes end with two zeros
        (9, "<Q", 2, "version 2 of Megatron's format; only version 1 is supported"),
        (17, "<B", 6, r"ids of type 6; supported are 1 \(uint8\), .*8 \(uint16\)"),  # floating-point
        (18, "<Q", 2**60, "truncated"),
        (26, "<Q", 0, "has no document index"),
        (26, "<Q", 4, "its document index goes from sequence 0 to 4, must be from 0 to 5"),
    ],
)
def test_a_wrong_header_is_refused(pair, at, form, value, words):
    tokens, index = pair
    _patch(index, at, form, value)
    with pytest.raises(UserError, match=f"{index}: .*{words}"):
        TokenFile(tokens.with_suffix(""))


def test_a_loss_mask_for_another_number_of_tokens_is_refused(pair):
    pair[0].with_suffix(".loss").write_bytes(bytes(13))
    with pytest.raises(UserError, match=r"a\.loss: has 13 bytes, must have one for each of the 14 tokens"):
        TokenFile(pair[0].with_suffix(""))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (_pointer(3), 2**40),  # past the end
        (_pointer(3), 4),  # before the previous document
        (_first_sequence(2), 6),
        (_first_sequence(2), -1),  # must not count from the end
    ],
)
def test_an_index_entry_with_a_wrong_offset_is_refused_when_it_is_read(pair, at, value):
    tokens, index = pair
    _patch(index, at, "<q", value)
    file = TokenFile(tokens.with_suffix(""))  # checks the last entries only
    for first, last in ((0, 4), (1, 2), (1, 3)):
        with pytest.raises(UserError, match=f"{index}: (document 2|sequence 3) "):
            file.boundaries(first, last)
    for _ in range(2):
        with pytest.raises(UserError, match=f"{index}: "):
            file.document_lengths()


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (_pointer(0), "<q", 2, "sequence 0 has 3 tokens at byte 2 of a.bin; the sequences before it end at byte 0"),
        (_length(1), "<i", 3, "sequence 2 has 1 tokens at byte 10 of a.bin; the sequences before it end at byte 12"),
        (_length(1), "<i", -2, "sequence 1 has -2 tokens"),
        (_first_sequence(1), "<q", 4, "document 2 begins with sequence 3: before the previous document"),
    ],
)
def test_a_check_finds_sequences_that_are_not_consecutive(pair, at, form, value, words):
    tokens, index = pair
    TokenFile(tokens.with_suffix("")).document_lengths()
    _patch(index, at, form, value)
    with pytest.raises(UserError, match=f"{index}: {words}"):
        TokenFile(tokens.with_suffix("")).document_lengths()


# ---------------------------------------------------------------------------------------------------------- large files


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_opened_and_accessed_without_reading_all_of_it(tmp_path):
    tokens, documents = 2**30, 10**7
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * tokens)
    with open(tmp_path / "a.idx", "wb") as file:  # 200 MB of zeros except for required values: all tokens are in one document
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        file.truncate(_HEADER + (4 + 8 + 8) * documents + 8)
        file.seek(_HEADER + 4 * documents - 8)
        file.write(struct.pack("<i", tokens))
        file.seek(_HEADER + 12 * documents - 8)
        file.write(struct.pack("<q", 2 * tokens))
        file.seek(-16, 2)
        file.write(struct.pack("<2q", documents - 1, documents))
    before = _resident()
    opened = TokenFile(tmp_path / "a")
    assert opened.documents == documents
    assert opened.boundaries(documents - 1, documents).tolist() == [tokens, tokens]
    assert opened.document_at(0) == documents - 2  # all before the last one begin at 0, and this one ends elsewhere
    assert opened.ids[tokens // 2 : tokens // 2 + 1] == 0
    assert pickle.loads(pickle.dumps(opened)).tokens == tokens
    assert _resident() - before < 20 * 10**6  # the smallest of the tables has 40 MB


@pytest.mark.parametrize(("damage", "message"), [("missing", "is missing"), ("cut", "truncated since")])
def test_a_file_that_another_process_can_no_longer_map_is_named(tmp_path, damage, message):
    file = write_file(tmp_path / "a", [[1, 2, 3]] * 10_000)
    tokens = path_of(file.prefix, "bin")
    sums_of(tokens).unlink()
    packed = pickle.dumps(TokenFile(file.prefix))
    assert len(packed) < 1000  # it is mapped in the other process
    again = pickle.loads(packed)
    tokens.unlink() if damage == "missing" else tokens.write_bytes(tokens.read_bytes()[:-2])
    assert again.tokens == 30_000  # opens nothing
    with pytest.raises(UserError, match=rf"a\.bin: {message}"):
        _ = again.ids[:]


# --------------------------------------------------------------------------------------------------------------- blocks


@pytest.fixture
def written(tmp_path) -> np.ndarray:
    """The values of a file of two and a half blocks."""
    values = np.random.default_rng(0).integers(0, 2**16, 5 * BLOCK // 4, dtype=np.uint16)
    (tmp_path / "a.bin").write_bytes(values.data)
    write_sums(tmp_path / "a.bin")
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
    first = number * BLOCK // 2 + 100
    for part in (slice(first, first + 1), slice(None)):  # of a long one, also if its first block has been verified
        where = rf"a\.bin: is damaged: block {number}, bytes {number * BLOCK:,} to "
        with pytest.raises(UserError, match=f"{where}.*; in the cache, remove its folder, .*; elsewhere, copy the file"):
            array[part]


def test_slices_of_a_verified_file_equal_those_of_a_plain_array(tmp_path, written):
    array = _array(tmp_path, written)
    assert array.checked() is array
    _ = array[0:1], array[BLOCK : BLOCK + 1]
    assert array.checked() is array
    _ = array[BLOCK // 2 : BLOCK // 2 + 1]
    assert array.checked() is array.numbers and np.array_equal(array.numbers, written)
    assert isinstance(pickle.loads(pickle.dumps(array)).checked(), Array)
