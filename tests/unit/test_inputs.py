"""The inputs that names, folders, patterns, data sets and URLs stand for, and their parts."""

import os

import pytest

from tests.raw_files import TEXTS, contents, json_lines, write_packed
from titanlite.data.prepare import documents, open_files
from titanlite.data.prepare.documents import group, list_inputs, stdlib_files
from titanlite.data.prepare.readers import Document, read
from titanlite.ground.errors import UserError

pytestmark = pytest.mark.usefixtures("small_parts")


def test_a_text_file_is_one_document_whose_bytes_are_kept_compressed_or_not(tmp_path):
    for name in ("a.txt", "b.md", "c.PY", "d.rst.gz", "e.txt.zst"):
        write_packed(tmp_path / name, f"{name}\r\n\n".encode())
    assert contents(tmp_path) == [f"{name}\r\n\n" for name in ("a.txt", "b.md", "c.PY", "d.rst.gz", "e.txt.zst")]


@pytest.mark.parametrize("name", ["a.log", "a.arrow", "a.html", "a.txt.bz2", "a.parquet.gz", "a.gz", "none", "a.jsonl~"])
@pytest.mark.parametrize("url", ["", "file://"])
def test_a_file_of_an_unknown_kind_is_refused_with_the_kinds_that_are_known(tmp_path, name, url):
    (tmp_path / name).write_text("text")
    with pytest.raises(UserError, match="not of a known kind of text") as error:
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
    with pytest.raises(UserError, match="holds no file of a known kind of"):
        list_inputs([f"{url}{tmp_path}{name}"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("c4", "titanlite tokenize --input hub:allenai/c4:en --output data/c4 --tokenizer ASSETS --append-eos"),
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
    assert contents(tmp_path / "b", tmp_path / "*.txt") == ["b/1.txt", "b/10.txt", "b/2.txt", "a.txt"]
    assert contents(tmp_path / "**" / "*.txt") == ["a.txt", "b/1.txt", "b/10.txt", "b/2.txt"]
    assert contents(tmp_path) == ["a.txt", "b/1.txt", "b/10.txt", "b/2.txt"]


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
    (tmp_path / "30.jsonl").write_bytes(json_lines(["y" * 50] * 20))
    parts = [part for entry in list_inputs([str(tmp_path)]) for part in entry.parts]
    units = group(parts)
    assert [part for unit in units for part in unit] == parts
    target = documents.unit_size(sum(part.size for part in parts))
    assert all(sum(part.size for part in unit) <= target or len(unit) == 1 for unit in units)
    assert len(units) < 25
    assert group([]) == []
    empty = parts[0]._replace(size=0)
    assert group([empty, empty]) == [[empty, empty]]


# ------------------------------------------------------------------------------------------------- data sets by name, URLs


def test_a_dataset_by_name_is_streamed_shard_by_shard(tmp_path, hub_cache):
    for name, texts in (("train-0", ["a", "b"]), ("train-1", ["c"]), ("test-0", ["d"])):
        write_packed(tmp_path / f"{name}.jsonl", json_lines(texts))
    [entry] = list_inputs([f"hub:{tmp_path}"])
    assert len(entry.parts) == 2
    assert contents(f"hub:{tmp_path}") == ["a", "b", "c"]
    assert contents(f"hub:{tmp_path}::test") == ["d"]
    os.utime(tmp_path / "train-1.jsonl", (1, 1))
    assert list_inputs([f"hub:{tmp_path}"])[0].stamp != entry.stamp


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "*.jsonl", "a.txt"])
def test_urls_and_their_patterns_are_read_as_files_are(tmp_path, name):
    content = b"text" if name.endswith("txt") else json_lines(TEXTS)
    write_packed(tmp_path / name.replace("*", "b"), content)
    assert contents(f"file://{tmp_path}/{name}") == (["text"] if name.endswith("txt") else TEXTS)


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
