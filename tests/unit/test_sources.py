"""What a path of the configuration means, what is made from text and cached, and which damage is reported before training."""

import json
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.raw_files import write_table
from tests.token_files import TEXTS, documents_of, write_file, write_jsonl
from tests.waiting import PATIENCE
from titanlite.config.schema import Config, Training
from titanlite.data.indexed import path_of
from titanlite.data.prepare import cache, documents, prepare
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.manifest import sealed
from titanlite.data.sources import TokenSource, file_faults, find, open_source, read_manifest, sources_of
from titanlite.data.tokenizer import LoadedTokenizer, load_tokenizer
from titanlite.ground.errors import UserError
from titanlite.ground.files import cache_folder

_KEY = "training.dataset_path"
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]}


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def loaded(assets) -> LoadedTokenizer:
    return load_tokenizer(str(assets))


@pytest.fixture
def tokenized(tmp_path, loaded) -> Path:
    """A folder of three shards, as written by `titanlite tokenize`."""
    text, folder = write_jsonl(tmp_path / "for-tokenized.jsonl"), tmp_path / "tokenized"
    prepare.prepare([str(text)], folder, loaded, append_eos=True, workers=1, shard_tokens=1000, on_error="fail")
    assert len(read_manifest(folder)["shards"]) == 3
    return folder


def _open(path: Path, assets: Path, vocabulary: int = 4096) -> TokenSource:
    [source] = sources_of(Config.model_validate({"training": {"dataset_path": str(path)}}), "training")
    return open_source(source, _KEY, load_tokenizer(str(assets)), str(assets), vocabulary)


def _documents(source: TokenSource) -> list[list[int]]:
    return [document for file in source.files for document in documents_of(file)]


def _expected(loaded: LoadedTokenizer, texts: list[str] = TEXTS) -> list[list[int]]:
    return [[*loaded.tokenizer.encode(text).ids, loaded.end_of_text] for text in texts]


# -------------------------------------------------------------------------------------------------------------- finding


def test_a_folder_of_tokenize_means_its_shards_in_order(tokenized):
    assert find(str(tokenized), _KEY) == [tokenized / name for name in ("00000", "00001", "00002")]
    values = read_manifest(tokenized)
    (tokenized / "manifest.json").write_text(json.dumps(sealed({**values, "shards": values["shards"][::-1]})))
    assert find(str(tokenized), _KEY) == [tokenized / name for name in ("00002", "00001", "00000")]


def test_a_pair_is_found_by_either_file_or_their_prefix_and_a_folder_means_its_sorted_pairs(tmp_path):
    for name in ("web", "a.1", "a.0"):
        write_file(tmp_path / name, [[1, 2]])
        for suffix in ("", ".bin", ".idx"):
            assert find(f"{tmp_path / name}{suffix}", _KEY) == [tmp_path / name]
    assert find(str(tmp_path), _KEY) == [tmp_path / name for name in ("a.0", "a.1", "web")]


def test_a_folder_above_those_of_tokenize_is_refused_and_text_beside_pairs_is_named(tokenized, tmp_path, assets, caplog):
    write_jsonl(tmp_path / "a.jsonl")
    for path in (str(tmp_path), f"{tmp_path}/**/*.json*"):
        with pytest.raises(UserError, match=rf"{tokenized} holds token files, not text; name each such folder"):
            find(path, _KEY)
    folder = tmp_path / "pairs"
    (folder / "more").mkdir(parents=True)
    for name in ("a", "more/b"):
        write_file(folder / name, [[1, 2]])
    _open(folder, assets)
    write_jsonl(folder / "c.jsonl")
    (folder / "notes").mkdir()
    (folder / "README.md").write_text("about the data")
    _open(folder, assets)
    warnings = [record.message.partition("name by itself: ")[2] for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["more", "c.jsonl, more"]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_of_a_pair_is_an_error(tmp_path, assets, suffix):
    for name in ("a", "b"):
        write_file(tmp_path / name, [[1, 2]])
    missing = path_of(tmp_path / "b", suffix)
    missing.unlink()
    for path in (tmp_path, tmp_path / "b"):
        with pytest.raises(UserError, match=f"{missing}: is missing"):
            _open(path, assets)


@pytest.mark.parametrize("content", ['{"version": 1}', '{"text": "x"}\n{"text": "y"}\n'], ids=["object", "lines"])
def test_a_folder_of_text_with_the_manifest_of_another_program_is_refused_with_a_pattern_that_is_read(tmp_path, content):
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path}/manifest.json: .*name the files") as error:
        find(str(tmp_path), _KEY)
    assert find(str(error.value).split()[-1], _KEY) is None


def test_a_folder_that_tokenize_has_not_finished_is_refused_with_what_to_do(tmp_path):
    (tmp_path / ".out.unfinished").mkdir()
    with pytest.raises(UserError, match="run the same `titanlite tokenize`"):
        find(str(tmp_path / "out"), _KEY)


# ------------------------------------------------------------------------------------------------------------ from text


def test_text_becomes_documents_that_end_with_the_end_of_text(tmp_path, assets, loaded):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:03d}.py").write_text(text)
    source = _open(tmp_path / "texts", assets)
    assert _documents(source) == _expected(loaded)
    assert source.folder is not None
    assert b"000.py" not in pickle.dumps(source)  # all ranks and workers get it; a million inputs have 60 MB of names
    assert (source.name, source.files[0].ids.dtype) == ("texts", np.uint16)


def test_fingerprint_is_of_the_tokens_and_not_of_names_and_times(tmp_path, assets):
    path = write_jsonl(tmp_path / "a.jsonl")
    before = _open(path, assets).fingerprint
    os.utime(path, (1, 1))
    assert _open(path, assets).fingerprint == before
    assert _open(write_jsonl(tmp_path / "other.jsonl"), assets).fingerprint == before
    for texts in (TEXTS[::-1], TEXTS[:-1], [TEXTS[0] + TEXTS[1], *TEXTS[2:]]):
        assert _open(write_jsonl(path, texts), assets).fingerprint != before


def test_chats_are_rendered_by_the_template_and_again_by_another(tmp_path, assets, loaded):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(_CHAT) + "\n")
    found = []
    for template in (_TEMPLATE, "again " + _TEMPLATE):
        (assets / "chat_template.jinja").write_text(template)
        [file] = _open(path, assets).files
        assert file.loss is not None
        predicted = file.ids[:][file.loss[:].astype(bool)].tolist()
        assert loaded.tokenizer.decode(predicted) == "four"
        found.append(loaded.tokenizer.decode(file.ids[:].tolist()))
    assert found == ["user:2 + 2?assistant:four", "again user:2 + 2?assistant:four"]


def test_an_interrupted_tokenization_leaves_nothing_that_looks_finished(tmp_path, assets, loaded, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")

    def fail(*_arguments):
        raise RuntimeError("in the middle")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="in the middle"):
        broken.setattr(prepare, "write_shards", fail)
        _open(path, assets)
    assert {entry.suffix for entry in cache_folder().glob("*tokens-*")} == {".lock", ".unfinished"}
    assert _documents(_open(path, assets)) == _expected(loaded)
    assert {entry.suffix for entry in cache_folder().glob("tokens-*")} == {".lock", ""}


def test_a_bad_entry_of_text_is_refused_with_the_command_that_leaves_it_out_and_leaves_nothing_in_the_cache(tmp_path, assets):
    path = write_jsonl(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(UserError, match=rf"a.jsonl, line 41: .*\n`titanlite tokenize --on-error skip .*; then {_KEY} names"):
        _open(path, assets)
    assert {entry.suffix for entry in cache_folder().glob("*tokens-*")} == {".lock"}


def _chat_without_a_template(folder: Path) -> str:
    (folder / "a.jsonl").write_text(json.dumps(_CHAT))
    return str(folder / "a.jsonl")


@pytest.mark.parametrize(
    ("write", "fault"),
    [
        (lambda folder: str(write_table(folder / "a.parquet", content=["x"])), "--text-key NAME"),
        (_chat_without_a_template, "a.jsonl, line 1: a chat, but the tokenizer's folder has no chat template"),
        (lambda folder: str(write_jsonl(folder / "a.jsonl")), None),
        (lambda folder: str((folder / "a.jsonl").write_text("") or folder / "a.jsonl"), None),  # the start says so
    ],
    ids=["another column", "chat", "sound", "empty"],
)
def test_a_check_reads_the_first_document_of_a_text(tmp_path, assets, write, fault):
    path = write(tmp_path)
    config = Config.model_validate({"training": {"dataset_path": path}, "model": {"hf_assets_path": str(assets)}})
    found = list(file_faults(config, 4096))
    assert len(found) == (fault is not None)
    assert all(f'{_KEY} = "{path}": ' in each and fault in each for each in found)
    assert not cache_folder().exists()


def test_text_is_tokenized_again_for_another_end_of_text(tmp_path, assets):
    path = write_jsonl(tmp_path / "a.jsonl")
    for end in ("<|endoftext|>", "x"):
        (assets / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        loaded = load_tokenizer(str(assets))
        assert loaded.tokenizer.id_to_token(loaded.end_of_text) == end
        assert _documents(_open(path, assets)) == _expected(loaded)


def test_best_fit_rows_are_other_data_than_the_text_whose_former_order_a_run_may_have(tmp_path, assets):
    """A resume compares fingerprints: rows of 0.3 had another order."""
    source = _open(write_jsonl(tmp_path / "a.jsonl"), assets)
    packed, fitted = (source.with_rows(Training(seq_len=2, document_policy=policy), _KEY) for policy in ("pack", "best_fit"))
    assert packed.fingerprint == source.fingerprint != fitted.fingerprint


def test_a_damaged_cache_folder_is_created_again(tmp_path, assets, loaded):
    path = write_jsonl(tmp_path / "a.jsonl")
    (_open(path, assets).files[0].prefix.parent / "manifest.json").write_text("{}")
    assert _documents(_open(path, assets)) == _expected(loaded)
    assert {entry.suffix for entry in cache_folder().glob("tokens-*")} == {".lock", ""}


def test_text_of_a_server_that_gives_no_version_is_named_once_in_the_log(tmp_path, loaded, monkeypatch, caplog):
    """The tokens of a replaced file stay in the cache."""
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("text")
    monkeypatch.setattr(cache, "_cached", lambda *_: None)
    for name in (str(tmp_path), url := f"file://{tmp_path}/*.txt"):
        cache.tokenized(name, _KEY, loaded, "")
    assert not caplog.messages
    monkeypatch.setattr(documents, "_STAMPS", ())
    cache.tokenized(url, _KEY, loaded, "")
    [message] = caplog.messages
    assert message.startswith(f"{url}: its server gives no time or checksum")


def test_a_cache_that_cannot_be_written_is_refused_with_the_variable_to_set(tmp_path, assets, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set TITANLITE_CACHE to another folder"):
        _open(write_jsonl(tmp_path / "a.jsonl"), assets)


def test_text_is_tokenized_by_as_many_workers_as_this_process_may_use_processors(tmp_path, assets, monkeypatch):
    make, workers = cache.prepare, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(
        cache, "prepare", lambda *given, **options: workers.append(options["workers"]) or make(*given, **options)
    )
    _open(write_jsonl(tmp_path / "a.jsonl"), assets)
    assert workers == [1]


def test_two_programs_at_once_make_tokens_once(tmp_path, assets, loaded, monkeypatch):
    """Two threads, which open the lock file each for itself as two processes do."""
    path, make, made, ready, answers = write_jsonl(tmp_path / "a.jsonl"), cache.prepare, [], threading.Barrier(2), []

    def slowly(*arguments, **options):
        made.append(1)
        time.sleep(0.3)
        return make(*arguments, **options)

    def one() -> None:
        ready.wait(timeout=PATIENCE)
        answers.append(_documents(_open(path, assets)))

    monkeypatch.setattr(cache, "prepare", slowly)
    both = [threading.Thread(target=one) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(PATIENCE)
    assert answers == [_expected(loaded)] * 2 and len(made) == 1


# ---------------------------------------------------------------------------------------------------- made by `tokenize`


def test_a_folder_of_tokenize_is_read_in_place(tokenized, assets, loaded, monkeypatch):
    monkeypatch.setattr(cache, "prepare", None)
    source = _open(tokenized, assets)
    assert _documents(source) == _expected(loaded)
    assert source.fingerprint == read_manifest(tokenized)["fingerprint"]


@pytest.mark.parametrize(("text", "append_eos", "warned"), [("a", False, True), ("a", True, False), (None, False, False)])
def test_token_files_without_the_end_of_text_that_a_run_appends_are_named_unless_they_are_chats(
    tmp_path, assets, caplog, text, append_eos, warned
):
    (assets / "chat_template.jinja").write_text(_TEMPLATE)
    entry, folder, loaded = {"text": text} if text else _CHAT, tmp_path / "tokens", load_tokenizer(str(assets))
    (tmp_path / "a.jsonl").write_text(json.dumps(entry))
    options = {"append_eos": append_eos, "workers": 1, "shard_tokens": 1000, "on_error": "fail"}
    prepare.prepare([str(tmp_path / "a.jsonl")], folder, loaded, chat=load_template(str(assets)), **options)
    _open(folder, assets)
    expected = f"{folder}: its texts end with nothing, not with <|endoftext|>: the model does not learn to end one; "
    assert sum(record.message.startswith(expected) for record in caplog.records) == warned


def test_tokens_of_another_tokenizer_are_refused(tokenized, assets):
    train_tokenizer(["other other other"]).save(str(assets / "tokenizer.json"))
    with pytest.raises(UserError, match=f"{tokenized}: made with another tokenizer than that of model.hf_assets_path"):
        _open(tokenized, assets)


def test_a_missing_loss_mask_is_reported_since_users_text_would_be_learned(tmp_path, assets):
    (assets / "chat_template.jinja").write_text(_TEMPLATE)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(_CHAT) + "\n")
    flags = path_of(_open(path, assets).files[0].prefix, "loss")
    flags.unlink()
    with pytest.raises(UserError, match=f"{flags}: is missing"):
        _open(path, assets)


# ------------------------------------------------------------------------------------------------------- made by others


def test_fingerprint_of_foreign_files_follows_their_content_and_not_their_name(tmp_path, assets):
    documents = [[1, 2, 3], [4, 5], [6, 7]]
    flags = [[True, True, True], [True, True], [True, True]]

    def fingerprint(name: str, documents: list[list[int]], losses: list[list[bool]] | None = None) -> str:
        source = _open(write_file(tmp_path / name, documents, losses=losses).prefix, assets)
        assert source.folder is None
        return source.fingerprint

    same = {fingerprint(name, documents) for name in ("a", "b")}
    others = {
        fingerprint("c", [[1, 2, 3], [4, 5], [6, 8]]),
        fingerprint("d", [[1, 2], [3, 4, 5], [6, 7]]),
        fingerprint("e", documents[:2]),
        fingerprint("f", documents, flags),
        fingerprint("g", documents, [[False, True, True], *flags[1:]]),
    }
    assert len(same) == 1
    assert len(others | same) == 6
