"""The inputs to which names, folders, patterns, datasets and URLs refer, and the documents of each kind of reader."""

import csv
import io
import json
import os
import random
import re

import pyarrow
import pyarrow.csv
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.raw_files import CHAT, TEXTS, contents, faults_in, json_lines, read_all, save_dataset, write_packed, write_table
from titanlite.data.prepare import documents, open_files, readers
from titanlite.data.prepare.documents import list_inputs, stdlib_files
from titanlite.data.prepare.readers import Bad, Document, describe_location
from titanlite.ground.errors import UserError

pytestmark = pytest.mark.usefixtures("small_parts")

OTHER_KEY = "; `titanlite tokenize --text-key NAME` reads another"


# ---------------------------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "json"])
def test_a_line_is_a_document_and_empty_lines_are_none(tmp_path, suffix):
    content = json_lines(TEXTS).replace(b"\n", b"\n\n  \r\n")
    assert contents(write_packed(tmp_path / f"a.{suffix}", content)) == TEXTS


@pytest.mark.parametrize("ending", [b"", b"\n\n"])
def test_documents_and_line_numbers_do_not_depend_on_the_split_of_a_jsonl_file(tmp_path, monkeypatch, ending):
    lines = [json_lines([text]).strip() for text in (*TEXTS, "", "short", "naïve")]
    lines[2:2] = [b"", b"{broken"]
    lines.append(b"[]")
    path = write_packed(tmp_path / "a.jsonl", b"\n".join(lines) + ending)
    monkeypatch.setattr(documents, "_UNITS", 1)
    whole = [found.content for found in read_all(path) if isinstance(found, Document)]
    assert len(whole) == 7
    for size in (1, 3, 50):
        monkeypatch.setattr(documents, "_LARGEST", size)
        assert len(list_inputs([str(path)])[0].parts) == -(-path.stat().st_size // size)
        assert [found.content for found in read_all(path) if isinstance(found, Document)] == whole
        assert [place for place, _ in faults_in(path)] == [f"{path}, line 4", f"{path}, line {len(lines)}"]


@pytest.mark.parametrize("suffix", ["jsonl.zst", "json"])
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"content": "x"}', f'must have a string under "text" or a list under "messages"; has "content"{OTHER_KEY}'),
        (b'{"text": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 10"),
        (b'{"text": "\\ud83d"}', "surrogate"),
        (b"[" * 200_000, "more than 100 lists and tables within each other"),
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_the_lines_around_it_are_read(tmp_path, suffix, line, fault):
    path = write_packed(tmp_path / f"bad.{suffix}", b'{"text": "before"}\n\n' + line + b'\n{"text": "after"}\n')
    [(place, reason)] = faults_in(path)
    assert place == f"{path}, line 3"
    assert fault in reason
    assert [found.content for found in read_all(path) if isinstance(found, Document)] == ["before", "after"]


def test_with_another_text_key_chats_are_not_read(tmp_path):
    path = write_packed(tmp_path / "a.jsonl", json.dumps({"body": "x", "text": "y"}).encode())
    assert contents(path, text_key="body") == ["x"]
    path.write_text(json.dumps({"messages": CHAT}))
    [(_, reason)] = faults_in(path, "body")
    assert 'string under "body"' in reason and "list" not in reason.partition(";")[0]


def test_messages_are_a_chat_where_there_is_no_text(tmp_path):
    entries = [{"messages": CHAT}, {"text": None, "messages": CHAT}, {"text": "x", "messages": CHAT}]
    path = write_packed(tmp_path / "a.jsonl", "\n".join(map(json.dumps, entries)).encode())
    assert contents(path) == [CHAT, CHAT, "x"]


# ---------------------------------------------------------------------------------------------------- arrays and tables


@pytest.mark.parametrize(("suffix", "indent"), [("json", None), ("json.gz", 1)])
def test_a_json_array_is_a_document_an_entry_as_the_datasets_library_reads_it(tmp_path, suffix, indent, hub_cache):
    datasets = pytest.importorskip("datasets")
    content = "\n" + json.dumps([{"text": text, "id": number} for number, text in enumerate(TEXTS)], indent=indent)
    path = write_packed(tmp_path / f"a.{suffix}", content.encode())
    assert contents(path) == TEXTS == list(datasets.load_dataset("json", data_files=str(path), split="train")["text"])


def test_a_json_file_of_one_object_is_one_document(tmp_path):
    for indent in (None, 1):
        assert contents(write_packed(tmp_path / "a.json", json.dumps({"text": "x"}, indent=indent).encode())) == ["x"]
    assert contents(write_packed(tmp_path / "a.json", b"\n \n")) == []


@pytest.mark.parametrize(("suffix", "ending", "quoting"), [("csv.gz", "\n", csv.QUOTE_MINIMAL), ("tsv", "\r\n", csv.QUOTE_ALL)])
def test_a_row_of_csv_is_a_document_as_pyarrow_reads_it(tmp_path, suffix, ending, quoting):
    delimiter = "\t" if "tsv" in suffix else ","
    texts = ["plain", 'with "quotes", and\ta tab', "two\nlines\n\n", "", "naïve 🙂", "x" * 200_000]
    lines = io.StringIO()
    writer = csv.writer(lines, delimiter=delimiter, lineterminator=ending, quoting=quoting)
    writer.writerows([["text", "id"], *((text, number) for number, text in enumerate(texts))])
    content = b"\xef\xbb\xbf" + lines.getvalue().encode()
    options = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    expected = pyarrow.csv.read_csv(io.BytesIO(content), parse_options=options)["text"].to_pylist()
    assert contents(write_packed(tmp_path / f"a.{suffix}", content)) == expected == texts


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("a.json", b'{"version": "1.0",\n"data": [1]}', "", 'entry 1: must have .*; has "version", "data"'),
        ("a.json", b'[{"text": "x"}, 3]', "", "entry 2: must be an object .*, is a number"),
        ("a.json", b'[{"text": "x"}\n {"text": "y"}]', "", "not JSON: .* at line 2, character 2"),
        ("a.csv", b"id,body\n1,x\n", "", 'must have a column "text"; its first line has "id", "body"'),
        ("a.csv", b'text,n\n"two\nlines",1\nx\ny,2\n', ", line 4", "has 1 fields, but the first line has 2"),
        ("a.csv", b'text,n\nx,1\n"y,2\n', ", line 3", "not CSV: unexpected end of data"),
    ],
)
def test_a_json_or_csv_file_of_no_documents_is_reported_with_entry_or_line(tmp_path, name, content, place, fault):
    path = write_packed(tmp_path / name, content)
    [(where, reason)] = faults_in(path)
    assert where == f"{path}{place}" and re.search(fault, reason)


_NOISE = [random.Random(number).randbytes(60).hex() for number in range(5000)]


@pytest.mark.parametrize(("suffix", "share"), [("jsonl.gz", 0.3), ("jsonl.zst", 0.9), ("json.gz", 0.5)])
def test_a_truncated_compressed_file_gives_the_lines_before_its_end_and_says_where_that_is(tmp_path, suffix, share):
    path = write_packed(tmp_path / f"a.{suffix}", json_lines(_NOISE))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    *sound, last = read_all(path)
    assert [found.content for found in sound] == _NOISE[: len(sound)]
    assert len(sound) > 5000 * share - 1500  # a compressed block is read completely or not at all
    assert isinstance(last, Bad) and "damaged or truncated" in last.reason
    assert describe_location(str(path), last.location) == f"{path}, line {len(sound) + 1}"


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_compressed_files_that_were_joined_are_read_as_one(tmp_path, suffix):
    path = write_packed(tmp_path / f"a.{suffix}", json_lines(["x"]))
    path.write_bytes(path.read_bytes() * 3)
    assert contents(path) == ["x"] * 3


# --------------------------------------------------------------------------------------------------------------- tables


def test_parquet_is_split_by_row_groups_and_gives_its_rows_in_order(tmp_path):
    path = write_table(tmp_path / "a.parquet")
    assert [(part.begin, part.end) for part in list_inputs([str(path)])[0].parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert contents(path) == [f"row {row}" for row in range(1000)]


def test_parquet_chats_are_lists_of_messages(tmp_path):
    path = write_table(tmp_path / "a.parquet", messages=[CHAT, CHAT], tools=[[{"name": "add"}], None])
    assert [(found.content, found.tools) for found in read_all(path)] == [(CHAT, [{"name": "add"}]), (CHAT, None)]


def test_a_chat_of_a_table_has_the_keys_that_it_has_as_a_line(tmp_path, hub_cache):
    """Arrow gives all objects of a column the same keys, such as the arguments of every function that any chat calls."""
    chats, tools = [], []
    for arguments in ({"a": 1}, {"b": ["x"]}):
        chats.append([*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": arguments}]}])
        tools.append([{"name": "f", "parameters": arguments}])
    (tmp_path / "hub").mkdir()
    lines = "\n".join(json.dumps({"messages": chat, "tools": tool}) for chat, tool in zip(chats, tools, strict=True))
    as_lines = write_packed(tmp_path / "hub" / "a.jsonl", lines.encode())
    table = write_table(tmp_path / "a.parquet", messages=chats, tools=tools)
    saved = save_dataset(tmp_path / "saved", messages=chats, tools=tools)
    for name in (as_lines, table, saved, f"hub:{tmp_path / 'hub'}"):
        assert [(found.content, found.tools) for found in read_all(name)] == list(zip(chats, tools, strict=True))


def test_a_saved_dataset_is_read_by_rows(tmp_path):
    folder = save_dataset(tmp_path / "saved", text=[f"row {row}" for row in range(3000)])
    assert len(list_inputs([str(folder)])[0].parts) > 1
    assert contents(folder) == [f"row {row}" for row in range(3000)]
    assert contents(tmp_path / "sav*") == contents(folder)


def test_a_folder_of_saved_datasets_is_refused_with_their_names_and_without_any_as_one_without_files(tmp_path):
    """`save_to_disk` of several splits writes dataset_dict.json, and then a folder for each."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    with pytest.raises(UserError, match="no file of a known kind"):  # the command was killed
        list_inputs([str(folder)])
    for split in ("train", "test"):
        save_dataset(folder / split, text=[split])
    with pytest.raises(UserError, match=f"test, train; name one, such as {folder / 'test'}"):
        list_inputs([str(folder)])
    assert contents(folder / "test") == ["test"]


# --------------------------------------------------------------------------------------------------------------- inputs


def test_a_text_file_is_one_document_whose_bytes_are_kept_compressed_or_not(tmp_path):
    for name in ("a.txt", "b.md", "c.PY", "d.rst.gz", "e.txt.zst"):
        write_packed(tmp_path / name, f"{name}\r\n\n".encode())
    assert contents(tmp_path) == [f"{name}\r\n\n" for name in ("a.txt", "b.md", "c.PY", "d.rst.gz", "e.txt.zst")]


@pytest.mark.parametrize("name", ["a.log", "a.txt.bz2", "a.parquet.gz", "a.gz", "none", "a.jsonl~"])
@pytest.mark.parametrize("url", ["", "file://"])
def test_a_file_of_an_unknown_kind_is_refused_with_the_kinds_that_are_known(tmp_path, name, url):
    (tmp_path / name).write_text("text")
    with pytest.raises(UserError, match="unknown suffix") as error:
        list_inputs([f"{url}{tmp_path / name}"], "training.dataset_path =")
    assert f'training.dataset_path = "{url}{tmp_path / name}"' in str(error.value)


@pytest.mark.parametrize(("url", "name"), [("", ""), ("", "/*"), ("", "/**/*"), ("file://", "/[!.]*")])
def test_files_of_unknown_kinds_and_about_the_data_are_left_out_of_folders_and_patterns_and_each_is_named_once(
    tmp_path, name, url
):
    write_packed(tmp_path / "data.jsonl", json_lines(["x"]))
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
    with pytest.raises(UserError, match="has no file of a known kind"):
        list_inputs([f"{url}{tmp_path}{name}"])


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("", ["link.txt", "self"]),
        ("/*", ["folder", "link.txt", "self"]),
        ("/**/*", ["link.txt", "self"]),
        ("/**/[1-9]*", ["link.txt", "self"]),
    ],
)
def test_folders_that_are_not_walked_are_named_and_links_that_lead_nowhere_are_refused(tmp_path, name, left_out):
    """`**` followed a link to its own folder, and the same documents were in the data 41 times."""
    (tmp_path / "elsewhere").mkdir()
    inputs = tmp_path / "inputs"
    (inputs / "folder").mkdir(parents=True)
    for path in ("elsewhere/3.txt", "inputs/2.txt", "inputs/folder/3.txt"):
        (tmp_path / path).write_text("text")
    (inputs / "link.txt").symlink_to(tmp_path / "elsewhere")
    (inputs / "self").symlink_to(inputs)
    warnings: list[str] = []
    found = list_inputs([f"{inputs}{name}"], "--input", warnings.append)
    assert {entry.path for entry in found} <= {str(inputs / "2.txt"), str(inputs / "folder" / "3.txt")}
    assert [line.rpartition("/")[2] for text in warnings for line in text.splitlines()[1:]] == left_out
    (inputs / "4.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"4\.txt: is missing"):
        list_inputs([f"{inputs}{name}"])
    (tmp_path / "unmounted").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such file or folder"):
        list_inputs([str(tmp_path / "unmounted")])


@pytest.mark.parametrize(
    ("name", "words"),
    [("c4", "hub:allenai/c4:en"), ("openai/gsm8k", "hub:openai/gsm8k"), ("nowhere", '"stdlib" is the built-in data')],
)
def test_a_name_that_is_not_a_file_is_refused_with_what_it_may_mean(name, words):
    with pytest.raises(UserError, match=f'training.dataset = "{name}": no such file or folder') as error:
        list_inputs([name], "training.dataset =")
    assert words in str(error.value)


def test_inputs_come_in_the_order_given_and_sorted_within_each_pattern_and_folder(tmp_path, monkeypatch):
    tmp_path /= "e[1]"  # of a folder, brackets are no pattern
    for name in ("b/2.txt", "a.txt", "b/1.txt", "b/10.txt", ".hidden", ".git/objects", "b/.cache/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert contents("b", "*.txt") == ["b/1.txt", "b/10.txt", "b/2.txt", "a.txt"]
    assert contents("**/*.txt") == ["a.txt", "b/1.txt", "b/10.txt", "b/2.txt"]
    assert contents(tmp_path) == ["a.txt", "b/1.txt", "b/10.txt", "b/2.txt"]


@pytest.mark.parametrize(
    ("name", "words"), [("*.none", "no file matches"), ("empty", "has no files"), ("file:///none/*.txt", "not found")]
)
def test_an_input_without_files_is_refused_with_its_name(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    path = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UserError, match=f"training.dataset_path .*{words}") as error:
        list_inputs([path], "training.dataset_path")
    assert path in str(error.value)


def test_a_file_that_two_inputs_name_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a\.txt is named twice"):
        list_inputs([str(tmp_path / "a.txt"), str(tmp_path / "*.txt")])


def test_stdlib_is_listed_sorted_without_tests_and_is_all_readable():
    files = stdlib_files()
    assert files == sorted(files)
    assert len(files) > 300 and len(contents(*files)) == len(files)


# ---------------------------------------------------------------------------------------------- datasets by name, URLs


def test_a_dataset_by_name_is_streamed_shard_by_shard(tmp_path, hub_cache):
    for name, texts in (("train-0", ["a", "b"]), ("train-1", ["c"]), ("test-0", ["d"])):
        write_packed(tmp_path / f"{name}.jsonl", json_lines(texts))
    [entry] = list_inputs([f"hub:{tmp_path}"])
    assert len(entry.parts) == 2
    assert contents(f"hub:{tmp_path}") == ["a", "b", "c"]
    assert contents(f"hub:{tmp_path}::test") == ["d"]
    os.utime(tmp_path / "train-1.jsonl", (1, 1))
    assert list_inputs([f"hub:{tmp_path}"])[0].stamp != entry.stamp
    for wrong in (":test", "::dev"):  # a split as a configuration; no such split
        with pytest.raises(UserError, match=r"or without a configuration as hub:[^ ]+::train_sft$"):
            list_inputs([f"hub:{tmp_path}{wrong}"])


def test_a_table_without_the_column_of_the_text_is_reported_once_with_the_option_that_names_another(tmp_path):
    table, saved = write_table(tmp_path / "a.parquet", content=["x"] * 9), save_dataset(tmp_path / "saved", content=["x"] * 9)
    for name in (table, saved):
        assert [reason.partition("has ")[2] for _, reason in faults_in(name)] == [f'"content"{OTHER_KEY}']


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "*.jsonl", "a.txt"])
def test_urls_and_their_patterns_are_read_as_files_are(tmp_path, name):
    content = b"text" if name.endswith("txt") else json_lines(TEXTS)
    write_packed(tmp_path / name.replace("*", "b"), content)
    assert contents(f"file://{tmp_path}/{name}") == (["text"] if name.endswith("txt") else TEXTS)


class _WithoutRanges(io.RawIOBase):
    """What fsspec opens of a server without range requests: it raises ValueError behind the first block."""

    def __init__(self, first: bytes):
        self.first = first

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = 0) -> int:
        raise ValueError("no ranges")

    def readinto(self, target) -> int:
        if not self.first:
            raise ValueError("no ranges")
        count = min(len(target), len(self.first))
        target[:count], self.first = self.first[:count], self.first[count:]
        return count


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a.jsonl", json_lines(TEXTS)),
        ("a.json", json_lines(TEXTS)),  # of which the first line was taken for the whole file
        ("a.json", b'[{"text": "x"},\n'),
        ("a.parquet", b"PAR1"),
    ],
    ids=["lines", "lines of .json", "array", "parquet"],
)
def test_a_url_that_cannot_be_read_to_its_end_is_refused(tmp_path, monkeypatch, name, first):
    write_table(tmp_path / name)
    for module in (documents, open_files, readers):
        monkeypatch.setattr(module, "open_bytes", lambda _: io.BufferedReader(_WithoutRanges(first)))
    with pytest.raises(UserError, match=rf"^file://{tmp_path}/{name}: cannot be read: ValueError: no ranges"):
        read_all(f"file://{tmp_path}/{name}")


@pytest.mark.parametrize("name", ["Last-Modified", "Content-MD5", "Digest", "LastModified", "blob_id", "xet_hash", "sha"])
def test_the_stamp_of_a_url_is_what_its_file_system_knows_of_the_version(tmp_path, monkeypatch, name):
    """As HTTP, S3, Hugging Face and GitHub call it: a replaced file of the same size had counted as the same."""
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(LocalFileSystem, "info", lambda *_, **__: {"name": "a.txt", "size": 4, "url": "x", name: "version 1"})
    assert list_inputs([f"file://{tmp_path}/a.txt"])[0].stamp == "version 1"


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
