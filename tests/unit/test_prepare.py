"""From text to token files: what is written, in which shards, and how unfinished work is continued."""

import errno
import fcntl
import json
import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.token_files import documents_of, write_jsonl
from titanlite.data.indexed import TokenFile
from titanlite.data.prepare import documents, prepare, shards
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.prepare.readers import BadDocument
from titanlite.data.tokenizer import LoadedTokenizer, describe, tokenizer_digest
from titanlite.ground.errors import UserError
from titanlite.launch import children

_TEXTS = [f"def add_{n}(a, b):\n    return a + b + {n}\n" * (n % 7) for n in range(60)]
_CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
_BAD = '{"text": 3}\n'


class _Template:
    """A fake ChatTemplate: one token per message."""

    source = "stand-in"

    def encode(self, messages: list[dict[str, str]], tools: Any = None) -> tuple[list[int], list[bool]]:
        if len(messages) < 2:
            raise ValueError("nobody answers")
        pieces = [(message["content"], message["role"] == "assistant") for message in messages]
        return ([len(text) for text, _ in pieces], [loss for _, loss in pieces])

    def unprompted(self) -> str:
        return ""


@pytest.fixture(scope="module")
def tokenizer() -> LoadedTokenizer:
    return describe(train_tokenizer(_TEXTS), None, "test")


@pytest.fixture
def many_units(monkeypatch):
    monkeypatch.setattr(documents, "_SMALLEST", 200)


_BOTH = '20 entries have a text in "text" and a chat in "messages": the text was read'


def _prepare(inputs: Any, output: Path, tokenizer: LoadedTokenizer, **options: Any) -> dict[str, Any]:
    names = [str(name) for name in (inputs if isinstance(inputs, list) else [inputs])]
    defaults = {"append_eos": True, "workers": 1, "shard_tokens": 10**9, "on_error": "fail"}
    return prepare.prepare(names, output, tokenizer, **defaults | options)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _documents(output: Path) -> list[list[int]]:
    files = [TokenFile(path.with_suffix("")) for path in sorted(output.glob("*.bin"))]
    return [document for file in files for document in documents_of(file)]


def _expected(tokenizer: LoadedTokenizer, texts: list[str], end: bool = True) -> list[list[int]]:
    return [tokenizer.tokenizer.encode(text).ids + [tokenizer.end_of_text] * end for text in texts]


# --------------------------------------------------------------------------------------------------------------- output


def test_the_manifest_describes_the_files(tmp_path, tokenizer, many_units):
    first, second = write_jsonl(tmp_path / "a.jsonl", _TEXTS), tmp_path / "b.txt"
    second.write_text("the end")
    manifest = _prepare([second, first], tmp_path / "out", tokenizer, shard_tokens=300)
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    ids = _documents(tmp_path / "out")
    assert manifest["documents"] == len(ids) == sum(shard["documents"] for shard in manifest["shards"])
    assert manifest["tokens"] == sum(map(len, ids)) == sum(shard["tokens"] for shard in manifest["shards"])
    assert manifest["largest_id"] == max(map(max, ids)) < manifest["vocabulary"] == tokenizer.vocabulary
    assert manifest["tokenizer"] == tokenizer_digest(tokenizer)
    assert (manifest["format"], manifest["chats"], manifest["skipped"]) == (1, False, 0)
    assert manifest["inputs"] == [
        {"path": str(second), "bytes": 7, "documents": 1, "tokens": len(ids[0])},
        {"path": str(first), "bytes": first.stat().st_size, "documents": 60, "tokens": manifest["tokens"] - len(ids[0])},
    ]
    for shard in manifest["shards"]:
        file = TokenFile(tmp_path / "out" / shard["name"])
        assert (file.documents, file.tokens) == (shard["documents"], shard["tokens"])
        content = (tmp_path / "out" / f"{shard['name']}.bin").read_bytes()
        assert shard["bin"] == xxhash.xxh3_128_hexdigest(content)
        assert shard["lengths"] == xxhash.xxh3_128_hexdigest(file.lengths[:].tobytes())
        assert shard["loss"] is None


@pytest.mark.parametrize(("limit", "end"), [(1, True), (100, True), (101, False), (10**9, True)])
def test_documents_come_in_order_with_the_end_of_text_in_shards_filled_up_to_the_limit(
    tmp_path, tokenizer, many_units, limit, end
):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    manifest = _prepare(path, tmp_path / "out", tokenizer, shard_tokens=limit, append_eos=end)
    documents = _expected(tokenizer, _TEXTS, end)
    expected: list[list[int]] = []
    for length in map(len, documents):
        if not expected or sum(expected[-1]) + length > limit:
            expected.append([])
        expected[-1].append(length)
    assert [shard["documents"] for shard in manifest["shards"]] == [len(shard) for shard in expected]
    assert _documents(tmp_path / "out") == documents
    assert manifest["end_of_text"] == (tokenizer.end_of_text if end else None)
    assert not (tmp_path / ".out.unfinished").exists()


def test_files_do_not_depend_on_workers_or_units(tmp_path, tokenizer, monkeypatch):
    lines = [json.dumps({"text": text}) for text in [*_TEXTS, "before <|endoftext|> after"]]
    lines[7:7] = ["broken", json.dumps({"messages": _CHAT[:1]}), json.dumps({"messages": _CHAT})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = {"shard_tokens": 300, "on_error": "skip", "chat": _Template()}
    _prepare(tmp_path / "a.jsonl", tmp_path / "one", tokenizer, **options)
    monkeypatch.setattr(documents, "_SMALLEST", 150)
    monkeypatch.setattr(shards, "_TOKENS_AT_ONCE", 7)
    _prepare(tmp_path / "a.jsonl", tmp_path / "units", tokenizer, **options)
    _prepare(tmp_path / "a.jsonl", tmp_path / "two", tokenizer, workers=2, **options)
    assert {"skipped.jsonl", "00000.bin", "00000.idx", "00000.loss", "00001.bin"} <= _files(tmp_path / "one").keys()
    assert _files(tmp_path / "one") == _files(tmp_path / "units") == _files(tmp_path / "two")
    assert all(ids.count(tokenizer.end_of_text) <= 1 for ids in _documents(tmp_path / "one"))  # without that of the last text


def test_chats_have_a_loss_file_beside_every_shard_and_no_end_of_text(tmp_path, tokenizer, many_units):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    path.write_text(path.read_text() + json.dumps({"messages": _CHAT}) + "\n")
    manifest = _prepare(path, tmp_path / "out", tokenizer, chat=_Template(), shard_tokens=300)
    assert manifest["chats"] and manifest["documents"] == 61
    assert _documents(tmp_path / "out") == [*_expected(tokenizer, _TEXTS), [6, 4]]
    files = [TokenFile(tmp_path / "out" / shard["name"]) for shard in manifest["shards"]]
    assert len(files) > 2
    loss = np.concatenate([file.loss[:] for file in files])
    assert loss.tolist() == [1] * (manifest["tokens"] - 2) + [0, 1]
    assert all(
        shard["loss"] == xxhash.xxh3_128_hexdigest((tmp_path / "out" / f"{shard['name']}.loss").read_bytes())
        for shard in manifest["shards"]
    )


def test_a_chat_whose_turns_end_where_no_generation_stops_is_a_warning(tmp_path, tokenizer, caplog):
    """Such a model, of a base model's tokenizer and another template, never stopped when it was served."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": _CHAT}) + "\n")
    (folder := tmp_path / "model").mkdir()
    for number, (ends, warns) in enumerate({"[9]": True, "[9, 1]": False}.items()):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
        caplog.clear()
        _prepare(path, tmp_path / f"out{number}", tokenizer._replace(source=str(folder / "tokenizer.json")), chat=_Template())
        ending = "generation stops at no token that the loss counts in a turn of a chat"
        assert (ending in caplog.text and '"eos_token" in tokenizer_config.json' in caplog.text) == warns == bool(caplog.text)
    caplog.clear()
    named = tokenizer._replace(source=str(folder / "tokenizer.json"))
    _prepare(path, tmp_path / "line ends", named, chat=_WithLineEnds())
    assert caplog.text == ""


def test_a_chat_template_that_does_not_prompt_for_the_assistants_turn_is_a_warning(tmp_path, tokenizer, caplog, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": _CHAT}) + "\n")
    monkeypatch.setattr(_Template, "unprompted", lambda self: "assistant: ")
    monkeypatch.setattr(_Template, "encode", lambda self, *_: ([tokenizer.end_of_text], [True]))
    _prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, chat=_Template())
    [warning] = caplog.messages
    assert "ignores add_generation_prompt" in warning and "'assistant: '" in warning


class _WithLineEnds(_Template):
    """A learned line end follows the token that ends the assistant's turn."""

    def encode(self, messages: list[dict[str, str]], tools: Any = None) -> tuple[list[int], list[bool]]:
        ids, learned = super().encode(messages, tools)
        return [*ids, 2], [*learned, True]


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"text_key": "text"}, False), ({"chat": None}, False)])
def test_texts_with_a_chat_beside_them_are_counted_unless_the_key_of_the_text_is_given(
    tmp_path, tokenizer, many_units, caplog, options, warned
):
    entries = [{"text": text, "messages": _CHAT} for text in _TEXTS[:20]] + [{"text": text} for text in _TEXTS[20:]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    _prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, **{"chat": _Template(), "workers": 2} | options)
    assert _documents(tmp_path / "out") == _expected(tokenizer, _TEXTS)
    assert [text.partition(";")[0] for text in caplog.messages if "a chat" in text] == [_BOTH] * warned


def test_a_large_text_file_which_is_one_document_is_named_with_what_to_write_instead(tmp_path, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(prepare, "_LARGE_TEXT", 1000)
    (tmp_path / "large.txt").write_text("x" * 1001)
    (tmp_path / "small.txt").write_text("x" * 1000)
    write_jsonl(tmp_path / "a.jsonl", ["x" * 2000])
    _prepare([tmp_path / name for name in ("large.txt", "small.txt", "a.jsonl")], tmp_path / "out", tokenizer)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{tmp_path}/large.txt: 1,001 bytes are one document") and ".jsonl" in warning


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_fault_ends_the_work_with_file_and_line_and_leaves_nothing_under_the_final_name(tmp_path, tokenizer, many_units):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    path.write_text(path.read_text() + _BAD)
    before = multiprocessing.active_children()
    with pytest.raises(BadDocument, match=r"a\.jsonl, line 61"):
        _prepare(path, tmp_path / "out", tokenizer, workers=2)
    assert not (tmp_path / "out").exists()
    assert set(multiprocessing.active_children()) <= set(before)


def test_skipped_documents_are_counted_and_all_listed_in_order(tmp_path, tokenizer, many_units):
    lines = write_jsonl(tmp_path / "a.jsonl", _TEXTS).read_text().splitlines()
    lines[30:30] = ["{", json.dumps({"messages": _CHAT}), '{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    manifest = _prepare([tmp_path / "a.jsonl", tmp_path / "latin.txt"], tmp_path / "out", tokenizer, on_error="skip")
    assert _documents(tmp_path / "out") == _expected(tokenizer, _TEXTS)
    listed = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    expected = [("a.jsonl", 31), ("a.jsonl", 32), ("a.jsonl", 33), ("latin.txt", None)]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in listed] == expected
    assert listed[1]["reason"] == "a chat, but the tokenizer's folder has no chat template"
    assert manifest["skipped"] == 4


def test_a_fault_that_quotes_bytes_that_are_not_utf8_is_listed(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.csv").write_bytes(b"Gr\xf6\xdfe,n\n1,2\n")
    _prepare([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out", tokenizer, on_error="skip")
    [entry] = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert r"Gr\udcf6\udcdfe" in entry["reason"]


def test_inputs_that_cannot_be_written_about_or_listed_are_refused_before_any_work(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "in/b").mkdir(parents=True)
    (tmp_path / "in/b/one.txt").write_text("one")
    (latin := tmp_path / "in" / os.fsdecode(b"caf\xe9.txt")).write_text("two")
    with pytest.raises(UserError, match=r"caf\\udce9.txt': its name is not in UTF-8"):
        _prepare(tmp_path / "in", tmp_path / "out", tokenizer)
    latin.rename(tmp_path / "in/two.txt")
    scandir = os.scandir

    def refusing(path: str) -> Any:  # as for a user who may not read it; root may
        if str(path).rstrip("/").endswith("in/b"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for name in (tmp_path / "in", tmp_path / "in/**/*.txt"):
        with pytest.raises(UserError, match=r"in/b cannot be read: Permission denied"):
            _prepare(name, tmp_path / "out", tokenizer)
    assert os.listdir(tmp_path) == ["in"]
    (tmp_path / "in/c").mkdir()
    (tmp_path / "in/two.txt").rename(tmp_path / "in/c/two.txt")
    _prepare(tmp_path / "i*/c/**/*.txt", tmp_path / "out", tokenizer)  # matches nothing in the other folder


def test_a_text_that_the_tokenizer_cannot_encode_is_named_among_others(tmp_path):
    words = Tokenizer(models.WordLevel({"<eos>": 0, "known": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = write_jsonl(tmp_path / "a.jsonl", ["known", "unknown", "known known"])
    manifest = _prepare(path, tmp_path / "out", describe(words, None, "test"), on_error="skip")
    assert _documents(tmp_path / "out") == [[1, 0], [1, 1, 0]]
    [entry] = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert entry["line"] == 2 and "the tokenizer cannot encode it" in entry["reason"]
    assert manifest["skipped"] == 1


def test_inputs_of_no_documents_are_refused_and_leave_nothing(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(_BAD)
    with pytest.raises(UserError, match=r"a\.jsonl"):
        _prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, on_error="skip")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


# ----------------------------------------------------------------------------------------------------------- half-done


class _Interrupt(BaseException):
    """An exception that nothing catches."""


def _end(*_: Any, **__: Any) -> None:
    raise _Interrupt


def _interrupted(inputs: Any, output: Path, tokenizer: LoadedTokenizer, place: str = "prepare.write_shards", **options) -> None:
    """Work that is interrupted at a point."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Interrupt):
        patch.setattr(f"titanlite.data.prepare.{place}", _end)
        _prepare(inputs, output, tokenizer, **options)


# At an index, at the renaming of a unit, at the assembly, at the manifest, at the last renaming.
@pytest.mark.parametrize(
    "place",
    ["shards.write_index", "encode.sync_contents", "prepare.write_shards", "prepare._count_inputs", "prepare._hand_over"],
)
def test_killed_at_any_instant_the_same_command_gives_the_same_files(tmp_path, tokenizer, many_units, place):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    _prepare(path, tmp_path / "whole", tokenizer, shard_tokens=300)
    _interrupted(path, tmp_path / "out", tokenizer, place, shard_tokens=300)
    assert not (tmp_path / "out").exists()
    _prepare(path, tmp_path / "out", tokenizer, shard_tokens=300)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


def test_another_command_is_refused_with_what_differs_and_the_remedy(tmp_path, tokenizer, many_units):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    other = describe(train_tokenizer(["other other"]), None, "test")
    _interrupted(path, tmp_path / "out", tokenizer)
    for difference, words in (
        ({"append_eos": False}, "end of text was "),
        ({"text_key": "body"}, "text key was text, is body"),
        ({"shard_tokens": 7}, "tokens of a shard was 1000000000, is 7"),
        ({"chat": _Template()}, "chat template was None, is "),
        ({"tokenizer": other}, "tokenizer was "),
    ):
        with pytest.raises(UserError, match=words):
            _prepare(path, tmp_path / "out", **{"tokenizer": tokenizer, **difference})
    _prepare(path, tmp_path / "out", tokenizer)


def test_changed_inputs_are_refused_with_their_names(tmp_path, tokenizer, many_units):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", _TEXTS) for name in "abc"]
    _interrupted(paths, tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="another order"):
        _prepare(paths[::-1], tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match=r"c\.jsonl is no longer among the inputs"):
        _prepare(paths[:2], tmp_path / "out", tokenizer)
    new = write_jsonl(tmp_path / "d.jsonl", _TEXTS)
    with pytest.raises(UserError, match=r"d\.jsonl is new"):
        _prepare([*paths, new], tmp_path / "out", tokenizer)
    os.utime(paths[1], (1, 1))
    with pytest.raises(UserError, match=r"b\.jsonl has changed"):
        _prepare(paths, tmp_path / "out", tokenizer)


def test_a_stop_signal_to_all_processes_does_not_end_the_workers(tmp_path, tokenizer, many_units, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    encode_all = prepare.encode_all

    def signaled(*arguments: Any) -> Any:
        for number, answer in enumerate(encode_all(*arguments)):
            yield answer
            if number == 0:
                for worker in multiprocessing.active_children():
                    for each in children.TO_ALL:
                        os.kill(worker.pid, each)

    monkeypatch.setattr(prepare, "encode_all", signaled)
    _prepare(path, tmp_path / "out", tokenizer, workers=2)
    assert _documents(tmp_path / "out") == _expected(tokenizer, _TEXTS)


def test_an_output_of_inputs_that_change_never_gets_the_final_name(tmp_path, tokenizer, many_units, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    encode_all = prepare.encode_all

    def meanwhile(*arguments: Any) -> Any:
        yield from encode_all(*arguments)
        write_jsonl(path, _TEXTS[:-1])

    monkeypatch.setattr(prepare, "encode_all", meanwhile)
    with pytest.raises(UserError, match=r"a\.jsonl has changed"):
        _prepare(path, tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_refused_and_not_touched(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: already exists"):
        _prepare(path, tmp_path / "out", tokenizer)
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["a.jsonl", "out"]


@pytest.mark.parametrize("pattern", ["", "/**"])
def test_an_output_inside_of_the_input_folder_is_no_input(tmp_path, tokenizer, pattern):
    """The command's own plan.json and record.json were new inputs at its end, and for every command that continued it."""
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/a.jsonl", _TEXTS)
    found = _prepare(f"{tmp_path}/data{pattern}", tmp_path / "data/tokens", tokenizer)
    assert found["documents"] == len(_TEXTS)


def test_two_commands_at_once_are_refused(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS)
    (tmp_path / ".out.unfinished").mkdir()
    with open(tmp_path / ".out.unfinished" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another command is running"):
            _prepare(path, tmp_path / "out", tokenizer)
    _prepare(path, tmp_path / "out", tokenizer)


def test_a_failed_write_is_reported_and_the_same_command_continues(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "_SMALLEST", 100_000)
    path = write_jsonl(tmp_path / "a.jsonl", _TEXTS * 30)
    _prepare(path, tmp_path / "whole", tokenizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # simulates a full disk
    try:
        with pytest.raises(UserError, match="finished units are kept"):
            _prepare(path, tmp_path / "out", tokenizer, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()
    _prepare(path, tmp_path / "out", tokenizer)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
