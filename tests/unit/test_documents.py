"""Inputs, their parts, and what each kind of reader makes of sound and of broken content."""

import csv
import gzip
import io
import json
import os
import random
import re
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.csv
import pyarrow.parquet as parquet
import pytest
import zstandard

from titanlite.data.prepare import documents, open_files
from titanlite.data.prepare.documents import group, list_inputs, stdlib_files
from titanlite.data.prepare.readers import Bad, Document, describe_place, read, where
from titanlite.errors import UserError

_TEXTS = ["def add(a, b):\n    return a + b\n", "naïve café, 数学, 🙂\r\n\ttabs\n", "", "x = 1\n" * 20]
_CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Inputs of a few hundred bytes are split as large ones are."""
    monkeypatch.setattr(documents, "_SMALLEST", 1)


@pytest.fixture
def hub_cache(tmp_path_factory, monkeypatch):
    """The package leaves locks in the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def _write(path: Path, content: bytes) -> Path:
    """A file that is compressed as its name says."""
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, lambda content: content)(content)
    path.write_bytes(packed)
    return path


def _table(path: Path, rows: int = 1000, **columns: object) -> Path:
    parquet.write_table(pyarrow.table(columns or {"text": [f"row {row}" for row in range(rows)]}), path, row_group_size=300)
    return path


def _saved_dataset(folder: Path, **columns: list[object]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return folder


def _read(*names: object, text_key: str = "text") -> list[Document | Bad]:
    parts = [part for entry in list_inputs([str(name) for name in names]) for part in entry.parts]
    return [found for part in parts for found in read(part, text_key)]


def _contents(*names: object, text_key: str = "text") -> list[object]:
    found = _read(*names, text_key=text_key)
    assert all(isinstance(one, Document) for one in found), found
    return [one.content for one in found]


def _faults(name: object, text_key: str = "text") -> list[tuple[str, str]]:
    """(place in words, reason) of what is no document, over all parts."""
    return [
        (describe_place(*where(part, found.place)), found.reason)
        for part in list_inputs([str(name)])[0].parts
        for found in read(part, text_key)
        if isinstance(found, Bad)
    ]


# --------------------------------------------------------------------------------------------------------------- inputs


def test_a_text_file_is_one_document_whose_bytes_are_kept_compressed_or_not(tmp_path):
    for name in ("a.txt", "b.md", "c.PY", "d.rst.gz", "e.txt.zst"):
        _write(tmp_path / name, f"{name}\r\n\n".encode())
    assert _contents(tmp_path) == [f"{name}\r\n\n" for name in ("a.txt", "b.md", "c.PY", "d.rst.gz", "e.txt.zst")]


@pytest.mark.parametrize("name", ["a.log", "a.arrow", "a.html", "a.txt.bz2", "a.parquet.gz", "a.gz", "none", "a.jsonl~"])
@pytest.mark.parametrize("url", ["", "file://"])
def test_a_file_of_an_unknown_kind_is_refused_with_the_kinds_that_are_known(tmp_path, name, url):
    (tmp_path / name).write_text("text")
    with pytest.raises(
        UserError, match=r"not of a known kind of text; known are \.jsonl \.ndjson \.json .*\.gz or \.zst"
    ) as error:
        list_inputs([f"{url}{tmp_path / name}"], "training.dataset_path =")
    assert f'training.dataset_path = "{url}{tmp_path / name}"' in str(error.value)


@pytest.mark.parametrize(("url", "name"), [("", ""), ("", "/*"), ("", "/**/*"), ("file://", "/[!.]*")])
def test_files_of_unknown_kinds_and_about_the_data_are_left_out_of_folders_and_patterns_and_each_is_named_once(
    tmp_path, name, url
):
    _write(tmp_path / "data.jsonl", _lines(["x"]))
    others = ["LICENSE", "README.md", "dataset_infos.json", "a.png", "b.arrow", "c"]
    for other in (*others, ".gitattributes"):
        (tmp_path / other).write_text("not data")
    warnings: list[str] = []
    [entry] = list_inputs([f"{url}{tmp_path}{name}"], "--input", warnings.append)
    assert entry.path == f"{url}{tmp_path}/data.jsonl"
    [warning] = warnings
    assert [line.strip().rpartition("/")[2] for line in warning.splitlines()[1:]] == sorted(others)
    assert warning.splitlines()[0].startswith(f'--input "{url}{tmp_path}')
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds no file of a known kind of text:\n.*LICENSE"):
        list_inputs([f"{url}{tmp_path}{name}"])


def test_a_readme_that_is_named_is_text(tmp_path):
    (tmp_path / "README.md").write_text("text")
    assert _contents(tmp_path / "README.md") == ["text"]


def test_of_many_files_that_are_left_out_the_first_fifty_are_named(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02d}.png").touch()
    (tmp_path / "a.txt").touch()
    warnings: list[str] = []
    list_inputs([str(tmp_path)], warn=warnings.append)
    assert warnings[0].splitlines()[50:] == [f"  {tmp_path}/49.png", "  and 10 more"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("c4", "titanlite tokenize --input hub:allenai/c4:en --output data/c4 --tokenizer ASSETS --append-eos"),
        ("c4_validation", "--input hub:allenai/c4:en:validation --output data/c4_validation"),
        ("c4_test", "--input torchtitan/tests/assets/c4_test --output data/c4_test"),
        ("FineWeb", "--input hub:HuggingFaceFW/fineweb --output data/fineweb"),
        ("allenai/c4", 'a data set of the Hugging Face hub "hub:allenai/c4"'),
        ("nowhere", 'the built-in data is called "stdlib"'),
    ],
)
def test_a_data_set_by_name_is_refused_with_the_command_that_makes_it(name, words):
    with pytest.raises(UserError, match=f'training.dataset = "{name}": no such file or folder') as error:
        list_inputs([name], "training.dataset =")
    assert words in str(error.value)


def test_inputs_come_in_the_order_given_and_sorted_within_each_pattern_and_folder(tmp_path):
    for name in ("b/2.txt", "a.txt", "b/1.txt", "b/10.txt", ".hidden", ".git/objects", "b/.cache/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _contents(tmp_path / "b", tmp_path / "*.txt") == ["b/1.txt", "b/10.txt", "b/2.txt", "a.txt"]
    assert _contents(tmp_path / "**" / "*.txt") == ["a.txt", "b/1.txt", "b/10.txt", "b/2.txt"]
    assert _contents(tmp_path) == ["a.txt", "b/1.txt", "b/10.txt", "b/2.txt"]


def test_a_hidden_folder_that_the_user_names_is_read(tmp_path):
    (tmp_path / ".data").mkdir()
    (tmp_path / ".data" / "a.txt").write_text("text")
    assert _contents(tmp_path / ".data") == ["text"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("brackets")
    (tmp_path / "a1.txt").write_text("pattern")
    assert _contents(tmp_path / "a[1].txt") == ["brackets"]


def test_paths_are_absolute_so_that_a_manifest_means_the_same_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert [entry.path for entry in list_inputs(["a.txt"])] == [str(tmp_path / "a.txt")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.txt", "no such file"),
        ("*.none", "no file matches"),
        ("empty", "holds no files"),
        ("file:///none/*.txt", "not found"),
    ],
)
def test_an_input_that_nothing_is_found_under_is_refused_with_its_name(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    path = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UserError, match=f"training.dataset_path .*{words}") as error:
        list_inputs([path], "training.dataset_path")
    assert path in str(error.value)


def test_a_file_that_two_inputs_name_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a\.txt is named twice"):
        list_inputs([str(tmp_path / "a.txt"), str(tmp_path / "*.txt")])


def test_a_changed_file_has_another_stamp(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    before = list_inputs([str(tmp_path)])[0]
    os.utime(tmp_path / "a.txt", (1, 1))
    assert list_inputs([str(tmp_path)])[0].stamp != before.stamp


def test_stdlib_is_listed_sorted_without_tests_and_is_all_readable():
    files = stdlib_files()
    assert files == sorted(files)
    assert len(files) > 300
    found = [
        document
        for entry in list_inputs([str(file) for file in files])
        for part in entry.parts
        for document in read(part, "text")
    ]
    assert len(found) == len(files) and all(isinstance(document, Document) for document in found)


def test_units_hold_all_parts_in_order_and_are_of_about_one_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_SMALLEST", 100)
    monkeypatch.setattr(documents, "_UNITS", 10)
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text("x" * (number + 1))
    (tmp_path / "30.jsonl").write_bytes(_lines(["y" * 50] * 20))
    parts = [part for entry in list_inputs([str(tmp_path)]) for part in entry.parts]
    units = group(parts)
    assert [part for unit in units for part in unit] == parts
    target = documents.unit_size(sum(part.size for part in parts))
    assert all(sum(part.size for part in unit) <= target or len(unit) == 1 for unit in units)
    assert len(units) < 25
    assert group([]) == []
    empty = parts[0]._replace(size=0)
    assert group([empty, empty]) == [[empty, empty]]


# ---------------------------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "json", "json.gz"])
def test_a_line_is_a_document_and_empty_lines_are_none(tmp_path, suffix):
    content = _lines(_TEXTS).replace(b"\n", b"\n\n  \r\n")
    assert _contents(_write(tmp_path / f"a.{suffix}", content)) == _TEXTS


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\n"])
def test_however_a_jsonl_file_is_split_its_documents_and_line_numbers_are_the_same(tmp_path, monkeypatch, ending):
    lines = [_lines([text]).strip() for text in (*_TEXTS, "", "short", "naïve")]
    lines[2:2] = [b"", b"{broken"]
    lines.append(b"[]")
    path = _write(tmp_path / "a.jsonl", b"\n".join(lines) + ending)
    monkeypatch.setattr(documents, "_UNITS", 1)
    whole = [found.content for found in _read(path) if isinstance(found, Document)]
    assert len(whole) == 7
    for size in (1, 2, 3, 7, 16, 50, 1000):
        monkeypatch.setattr(documents, "_LARGEST", size)
        assert len(list_inputs([str(path)])[0].parts) == -(-path.stat().st_size // size)
        assert [found.content for found in _read(path) if isinstance(found, Document)] == whole
        assert [place for place, _ in _faults(path)] == [f"{path}, line 4", f"{path}, line {len(lines)}"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "json"])
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"content": "x"}', 'must have a string under "text" or a list under "messages"; has "content"'),
        (b'{"text": 3}', '"text" is a number'),
        (b'{"text": null}', '"text" is null'),
        (b'{"messages": "hello"}', '"messages" is a string'),
        (b'["text"]', "is a list"),
        (b'{"text": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 10"),
        (b'{"text": "\\ud83d"}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\uDC00"}]}', "surrogate"),
        (b'{"text": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 200_000, "recursion"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_the_lines_around_it_are_read(tmp_path, suffix, line, fault):
    path = _write(tmp_path / f"bad.{suffix}", b'{"text": "before"}\n\n' + line + b'\n{"text": "after"}\n')
    [(place, reason)] = _faults(path)
    assert place == f"{path}, line 3"
    assert fault in reason
    assert [found.content for found in _read(path) if isinstance(found, Document)] == ["before", "after"]


def test_a_whole_surrogate_pair_is_text(tmp_path):
    assert _contents(_write(tmp_path / "a.jsonl", b'{"text": "\\ud83d\\ude42"}')) == ["🙂"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert _contents(_write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + _lines(["x"]))) == ["x"]
    assert _contents(_write(tmp_path / "a.txt", b"\xef\xbb\xbfx")) == ["x"]


def test_another_text_key_is_read_and_then_chats_are_not(tmp_path):
    path = _write(tmp_path / "a.jsonl", json.dumps({"body": "x", "text": "y"}).encode())
    assert _contents(path, text_key="body") == ["x"]
    path.write_text(json.dumps({"messages": _CHAT}))
    [(_, reason)] = _faults(path, "body")
    assert 'string under "body"' in reason and "list" not in reason.partition(";")[0]


def test_messages_are_a_chat_where_there_is_no_text(tmp_path):
    entries = [{"messages": _CHAT}, {"text": None, "messages": _CHAT}, {"text": "x", "messages": _CHAT}]
    path = _write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, entries)).encode())
    assert _contents(path) == [_CHAT, _CHAT, "x"]


# ------------------------------------------------------------------------------------------------------- arrays and tables


@pytest.mark.parametrize("suffix", ["json", "json.gz", "json.zst"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_a_document_an_entry_as_the_datasets_library_reads_it(tmp_path, suffix, indent, hub_cache):
    datasets = pytest.importorskip("datasets")
    content = "\n" + json.dumps([{"text": text, "id": number} for number, text in enumerate(_TEXTS)], indent=indent)
    path = _write(tmp_path / f"a.{suffix}", content.encode())
    assert _contents(path) == _TEXTS == list(datasets.load_dataset("json", data_files=str(path), split="train")["text"])


def test_a_json_file_of_one_object_is_one_document(tmp_path):
    for indent in (None, 1):
        assert _contents(_write(tmp_path / "a.json", json.dumps({"text": "x"}, indent=indent).encode())) == ["x"]
    assert _contents(_write(tmp_path / "a.json", b"\n \n")) == []


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"version": "1.0",\n"data": [1]}', 'entry 1: must have .*; has "version", "data"'),
        (b'{"text": ["a", "b"]}', '"text" is a list'),
        (b'[{"text": "x"}, 3]', "entry 2: must be an object .*, is a number"),
        (b'[{"text": "x"}, {"text": "\\ud800"}]', "entry 2: not Unicode"),
        (b'[{"text": "x"}\n {"text": "y"}]', "not JSON: .* at line 2, character 2"),
        (b'"text"', "is a string"),
        (b"some words\n", "not JSON: Expecting value at character 1"),
        (b"[\xff]", "utf-8"),
    ],
)
def test_a_json_file_that_is_no_documents_is_reported_with_the_entry(tmp_path, content, fault):
    [bad] = [found for found in _read(_write(tmp_path / "a.json", content)) if isinstance(found, Bad)]
    assert re.search(fault, bad.reason)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz", "tsv.zst"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_row_of_csv_is_a_document_as_pyarrow_reads_it(tmp_path, suffix, ending):
    delimiter = "\t" if "tsv" in suffix else ","
    texts = ["plain", 'with "quotes", and\ta tab', "two\nlines\n\n", "", "naïve 🙂", "x" * 200_000]
    lines = io.StringIO()
    writer = csv.writer(lines, delimiter=delimiter, lineterminator=ending)
    writer.writerows([["id", "text"], *enumerate(texts)])
    content = b"\xef\xbb\xbf" + lines.getvalue().encode()
    options = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    expected = pyarrow.csv.read_csv(io.BytesIO(content), parse_options=options)["text"].to_pylist()
    assert _contents(_write(tmp_path / f"a.{suffix}", content)) == expected == texts


@pytest.mark.parametrize(
    ("content", "place", "fault"),
    [
        (b"id,body\n1,x\n", None, 'must have a column "text"; its first line has "id", "body"'),
        (b'text,n\n"two\nlines",1\nx\ny,2\n', 4, "has 1 fields, and the first line 2"),
        (b"text,n\nx,1\ncaf\xe9,2\ny,3\n", 3, "not UTF-8 text: byte 0xe9"),
        (b'text,n\nx,1\n"y"z,2\ny,3\n', 3, "not CSV"),
        (b'text,n\nx,1\n"y,2\n', 3, "not CSV: unexpected end of data"),
    ],
)
def test_a_bad_row_of_csv_is_reported_with_the_line_it_begins_on(tmp_path, content, place, fault):
    path = _write(tmp_path / "a.csv", content)
    [(where, reason)] = _faults(path)
    assert where == (str(path) if place is None else f"{path}, line {place}")
    assert fault in reason


@pytest.mark.parametrize("name", ["a.csv.gz", "a.json.gz", "a.txt.zst"])
def test_a_truncated_compressed_table_or_text_is_one_fault(tmp_path, name):
    content = {"a.csv.gz": b"text\n" + "\n".join(_NOISE).encode(), "a.txt.zst": "\n".join(_NOISE).encode()}
    path = _write(tmp_path / name, content.get(name, json.dumps([{"text": text} for text in _NOISE]).encode()))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    [(_, reason)] = _faults(path)
    assert "damaged or truncated" in reason


_NOISE = [random.Random(number).randbytes(60).hex() for number in range(5000)]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "json.gz"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_truncated_compressed_file_gives_the_lines_before_its_end_and_says_where_that_is(tmp_path, suffix, share):
    path = _write(tmp_path / f"a.{suffix}", _lines(_NOISE))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    *sound, last = _read(path)
    assert [found.content for found in sound] == _NOISE[: len(sound)]
    assert len(sound) > 5000 * share - 1500  # a compressed block is whole or not at all
    assert isinstance(last, Bad) and "damaged or truncated" in last.reason
    assert describe_place(str(path), last.place) == f"{path}, line {len(sound) + 1}"


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_a_damaged_compressed_file_is_told(tmp_path, suffix):
    compress = {"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress}[suffix]
    content, path = compress(_lines(_NOISE)), tmp_path / f"a.{suffix}"
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(5000) + content[half + 5000 :])
    found = _read(path)
    assert [one.content for one in found[:500]] == _NOISE[:500]
    assert isinstance(found[-1], Bad) and "damaged or truncated" in found[-1].reason


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_compressed_files_that_were_joined_are_read_as_one(tmp_path, suffix):
    path = _write(tmp_path / f"a.{suffix}", _lines(["x"]))
    path.write_bytes(path.read_bytes() * 3)
    assert _contents(path) == ["x"] * 3


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "txt"])
def test_an_empty_file_holds_nothing_or_an_empty_text(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"")
    assert _contents(path) == ([""] if suffix == "txt" else [])


def test_text_that_is_not_utf8_is_told_with_its_line(tmp_path):
    path = _write(tmp_path / "latin.txt", "one\ntwo\ncafé".encode("latin-1"))
    [(place, reason)] = _faults(path)
    assert place == str(path)
    assert "not UTF-8 text: line 3" in reason


def test_a_file_that_cannot_be_read_is_the_users_and_never_skipped(tmp_path):
    path = _write(tmp_path / "a.jsonl", _lines(["x"]))
    [entry] = list_inputs([str(path)])
    path.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read: No such file"):
        list(read(entry.parts[0], "text"))


# --------------------------------------------------------------------------------------------------------------- tables


def test_parquet_is_split_by_row_groups_and_gives_its_rows_in_order(tmp_path):
    path = _table(tmp_path / "a.parquet")
    assert [(part.begin, part.end) for part in list_inputs([str(path)])[0].parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert _contents(path) == [f"row {row}" for row in range(1000)]


def test_parquet_chats_are_lists_of_messages(tmp_path):
    path = _table(tmp_path / "a.parquet", messages=[_CHAT, _CHAT], tools=[[{"name": "add"}], None])
    assert [(found.content, found.tools) for found in _read(path)] == [(_CHAT, [{"name": "add"}]), (_CHAT, None)]


def test_a_row_without_text_is_told_with_its_number_from_zero(tmp_path):
    path = _table(tmp_path / "a.parquet", text=[None if row == 700 else "x" for row in range(1000)])
    assert _faults(path) == [
        (f"{path}, row 700", 'must have a string under "text" or a list under "messages"; "text" is null'),
    ]


def test_a_parquet_text_that_is_not_utf8_is_told_with_its_row(tmp_path):
    values = pyarrow.array([b"x", b"\xff", b"y"]).view(pyarrow.string())
    path = _table(tmp_path / "a.parquet", text=values)
    [(place, reason)] = _faults(path)
    assert place == f"{path}, row 1"
    assert "not UTF-8" in reason
    assert [found.content for found in _read(path) if isinstance(found, Document)] == ["x", "y"]


def test_a_table_without_the_column_is_one_fault(tmp_path):
    path = _table(tmp_path / "a.parquet", body=["x"] * 1000)
    [(place, reason)] = _faults(path)
    assert place == str(path)
    assert 'has "body"' in reason
    assert len(_contents(path, text_key="body")) == 1000


def test_a_parquet_file_that_is_damaged_is_told_and_its_sound_row_groups_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    texts = _NOISE[:1000]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=300, use_dictionary=False)
    begin = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    content = path.read_bytes()
    path.write_bytes(content[:begin] + b"\xff" * 64 + content[begin + 64 :])
    [(place, reason)] = _faults(path)
    assert place == f"{path}, row 300"
    assert "rows 300 to 599 cannot be read" in reason
    assert [found.content for found in _read(path) if isinstance(found, Document)] == texts[:300] + texts[600:]


def test_a_truncated_parquet_file_is_one_fault(tmp_path):
    path = _table(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-10])
    [(place, reason)] = _faults(path)
    assert place == str(path)
    assert "not a Parquet file, or truncated" in reason


def test_a_saved_dataset_is_read_by_rows(tmp_path):
    folder = _saved_dataset(tmp_path / "saved", text=[f"row {row}" for row in range(3000)])
    assert len(list_inputs([str(folder)])[0].parts) > 1
    assert _contents(folder) == [f"row {row}" for row in range(3000)]
    assert _contents(tmp_path / "sav*") == _contents(folder)


def test_the_splits_of_a_saved_dataset_are_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="splits test, train; name the folder of one"):
        list_inputs([str(tmp_path / "saved")])
    assert _contents(tmp_path / "saved" / "train") == ["x"]


def test_a_dataset_by_name_is_streamed_shard_by_shard(tmp_path, hub_cache):
    for name, texts in (("train-0", ["a", "b"]), ("train-1", ["c"]), ("test-0", ["d"])):
        _write(tmp_path / f"{name}.jsonl", _lines(texts))
    [entry] = list_inputs([f"hub:{tmp_path}"])
    assert len(entry.parts) == 2
    assert _contents(f"hub:{tmp_path}") == ["a", "b", "c"]
    assert _contents(f"hub:{tmp_path}::test") == ["d"]
    os.utime(tmp_path / "train-1.jsonl", (1, 1))
    assert list_inputs([f"hub:{tmp_path}"])[0].stamp != entry.stamp


def test_a_dataset_by_name_tells_the_shard_and_row_of_a_fault(tmp_path, hub_cache):
    for number, texts in enumerate((["a"], ["b", None])):
        _write(tmp_path / f"train-{number}.jsonl", _lines(texts))
    [(place, reason)] = _faults(f"hub:{tmp_path}")
    assert place == f"hub:{tmp_path}, shard 1, row 1"
    assert '"text" is null' in reason


def test_a_dataset_that_cannot_be_opened_is_refused_with_its_name(tmp_path, hub_cache):
    with pytest.raises(UserError, match=f"hub:{tmp_path}/none: cannot be opened"):
        list_inputs([f"hub:{tmp_path}/none"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "*.jsonl", "a.txt"])
def test_urls_and_their_patterns_are_read_as_files_are(tmp_path, name):
    content = b"text" if name.endswith("txt") else _lines(_TEXTS)
    _write(tmp_path / name.replace("*", "b"), content)
    assert _contents(f"file://{tmp_path}/{name}") == (["text"] if name.endswith("txt") else _TEXTS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl?signature=a.txt"])
def test_a_url_is_known_by_its_suffix_before_any_signature_and_even_without_a_folder(name):
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/{name}", _lines(_TEXTS))
    assert _contents(f"memory://{name}") == _TEXTS
    memory.rm(f"/{name}")


def test_a_url_that_does_not_tell_its_size_is_one_part(tmp_path):
    path = _write(tmp_path / "a.jsonl", _lines(_TEXTS))
    [part] = documents._split(f"file://{path}", "jsonl", None, 10)
    assert [found.content for found in read(part, "text")] == _TEXTS


def test_parquet_behind_a_url_is_read(tmp_path):
    _table(tmp_path / "a.parquet")
    assert len(_contents(f"file://{tmp_path}/a.parquet")) == 1000


def test_a_url_of_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="nowhere://x: cannot be listed"):
        list_inputs(["nowhere://x"])


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard"), ("hub:x", "datasets"), ("file:///x", "fsspec")]
)
def test_a_missing_optional_package_is_named_with_what_installs_it(tmp_path, monkeypatch, name, module):
    def import_module(wanted: str) -> None:
        raise ImportError(wanted)

    monkeypatch.setattr(open_files.importlib, "import_module", import_module)
    (tmp_path / name).touch() if ":" not in name else None
    with pytest.raises(UserError, match=rf"needs {module}: pip install 'titanlite\[data\]'"):
        list_inputs([name if ":" in name else str(tmp_path / name)])
