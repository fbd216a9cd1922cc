"""From files to batches: documents, tokenizer, the cached row of token ids, each rank's part of the global batches."""

import itertools
import json
import multiprocessing
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from titanlite.config import Config, Model, Training
from titanlite.data import tokens
from titanlite.data.batches import batches, count_samples, read_samples
from titanlite.data.documents import list_files, read_documents
from titanlite.data.order import sample_at
from titanlite.data.tokenizer import load_tokenizer, train_tokenizer
from titanlite.data.tokens import TokenData, prepare_tokens
from titanlite.errors import UserError

_TEXTS = ["def add(a, b):\n    return a + b\n", "naïve café, 数学, 🙂\r\n\ttabs\n", "", "x = 1\n" * 20]


def _jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    train_tokenizer(_TEXTS).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def config(tmp_path, tokenizer_folder, monkeypatch) -> Config:
    """Four small documents, a tokenizer, and an empty cache."""
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    return _config(tokenizer_folder, _jsonl(tmp_path / "data.jsonl", _TEXTS))


def _config(tokenizer_folder: Path, data: Path, seq_len: int = 16) -> Config:
    training = Training(dataset_path=str(data), seq_len=seq_len)
    return Config(model=Model(hf_assets_path=str(tokenizer_folder)), training=training)


# ----------------------------------------------------------------------------------------------------------- documents


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(_TEXTS[0])
    assert list(read_documents(list_files("stdlib", str(path)))) == [_TEXTS[0]]
    assert list_files(str(path), "") == [path]


def test_jsonl_gives_a_document_a_line_and_skips_empty_lines(tmp_path):
    path = _jsonl(tmp_path / "a.jsonl", _TEXTS)
    path.write_text(path.read_text().replace("\n", "\n\n  \n"))
    assert list(read_documents([path])) == _TEXTS


def test_folder_is_read_in_sorted_order_without_hidden_files_and_folders(tmp_path):
    for name in ("b/2.txt", "a.txt", "b/1.txt", ".hidden", ".git/objects", "b/.cache/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    _jsonl(tmp_path / "c.jsonl", ["one", "two"])
    assert list(read_documents(list_files("stdlib", str(tmp_path)))) == ["a.txt", "b/1.txt", "b/2.txt", "one", "two"]


def test_a_hidden_folder_that_the_user_names_is_read(tmp_path):
    folder = tmp_path / ".data"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    assert list_files(str(folder), "") == [folder / "a.txt"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"content": "x"}', '"text"'),
        (b'{"text": 3}', '"text"'),
        (b'["text"]', '"text"'),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud83d"}', "not Unicode"),
    ],
)
def test_a_bad_jsonl_line_is_named_with_file_and_number(tmp_path, line, fault):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(UserError) as error:
        list(read_documents([path]))
    assert f"{path}, line 3" in str(error.value)
    assert fault in str(error.value)


def test_a_text_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8"):
        list(read_documents([path]))


def test_no_data_is_refused_with_the_key_and_the_path(tmp_path):
    for dataset, dataset_path, words in (
        ("stdlib", str(tmp_path), ["training.dataset_path", str(tmp_path), "holds no files"]),
        ("stdlib", str(tmp_path / "none"), ["training.dataset_path", "no such file"]),
        ("c4", "", ['training.dataset = "c4"', "stdlib"]),
        ("c4", str(tmp_path), ["'c4'", "both"]),
    ):
        with pytest.raises(UserError) as error:
            list_files(dataset, dataset_path)
        assert all(word in str(error.value) for word in words)


def test_stdlib_listing_is_sorted_and_leaves_out_tests_and_installed_packages():
    files = list_files("stdlib", "")
    assert files == sorted(files)
    assert len(files) > 300
    assert {"dataclasses.py", "argparse.py"} <= {file.name for file in files}
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = {part for file in files for part in file.relative_to(root).parts[:-1]}
    assert not {"test", "tests", "idle_test", "site-packages"}.intersection(folders)


def test_stdlib_is_all_readable():
    assert sum(1 for _ in read_documents(list_files("stdlib", ""))) == len(list_files("stdlib", ""))


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_training_twice_gives_the_same_tokenizer():
    documents = list(read_documents(list_files("stdlib", "")[:12]))
    first, second = train_tokenizer(documents), train_tokenizer(iter(documents))
    assert first.to_str() == second.to_str()
    assert 300 < first.get_vocab_size() <= 4096


def test_loaded_tokenizer_knows_its_end_of_text_and_vocabulary(tokenizer_folder):
    loaded = load_tokenizer(str(tokenizer_folder))
    assert loaded.tokenizer.id_to_token(loaded.end_of_text) == "<|endoftext|>"
    assert loaded.vocabulary == loaded.tokenizer.get_vocab_size()


@pytest.mark.parametrize("end", ["Ġ", {"content": "Ġ", "lstrip": False}])
def test_end_of_text_is_the_one_that_tokenizer_config_names(tokenizer_folder, end):
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}), encoding="utf-8")
    loaded = load_tokenizer(str(tokenizer_folder))
    assert loaded.tokenizer.id_to_token(loaded.end_of_text) == "Ġ"


@pytest.mark.parametrize("settings", [{}, {"eos_token": None}])
def test_a_tokenizer_config_without_an_end_leaves_the_usual_names(tokenizer_folder, settings):
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(str(tokenizer_folder))
    assert loaded.tokenizer.id_to_token(loaded.end_of_text) == "<|endoftext|>"


def test_a_missing_end_of_text_is_refused_naming_what_was_looked_for(tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text('{"eos_token": "<the end>"}')
    with pytest.raises(UserError, match=r"tokenizer.json: has no end-of-text token; looked for <the end>"):
        load_tokenizer(str(tokenizer_folder))
    (tokenizer_folder / "tokenizer_config.json").unlink()
    path = tokenizer_folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<other>"))
    with pytest.raises(UserError, match=r"looked for .*<\|endoftext\|>.*</s>"):
        load_tokenizer(str(tokenizer_folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_file_is_named(tokenizer_folder, name):
    (tokenizer_folder / name).write_text("[1")
    with pytest.raises(UserError, match=name):
        load_tokenizer(str(tokenizer_folder))


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model.hf_assets_path = .*no tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_truncation_and_padding_that_a_tokenizer_file_asks_for_are_not_applied(tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    plain = load_tokenizer(str(tokenizer_folder)).tokenizer
    cutting = Tokenizer.from_file(str(path))
    cutting.enable_truncation(5)
    cutting.enable_padding()
    cutting.save(str(path))
    loaded = load_tokenizer(str(tokenizer_folder)).tokenizer
    expected = [encoding.ids for encoding in plain.encode_batch(_TEXTS)]
    assert [encoding.ids for encoding in loaded.encode_batch(_TEXTS)] == expected


# -------------------------------------------------------------------------------------------------------------- tokens


def test_ids_are_the_documents_each_closed_by_the_end_of_text(config):
    data = prepare_tokens(config)
    loaded = load_tokenizer(config.model.hf_assets_path)
    text = loaded.tokenizer.decode(data.ids.tolist(), skip_special_tokens=False)
    assert text == "".join(document + "<|endoftext|>" for document in _TEXTS)
    assert data.documents == len(_TEXTS)
    assert data.ids[-1] == loaded.end_of_text
    assert data.ids.max() < data.vocabulary == loaded.vocabulary
    assert data.ids.dtype == np.uint16


def test_a_document_that_spells_out_the_end_of_text_token_does_not_end_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "spells.txt").write_text("before <|endoftext|> after " * 20)
    data = prepare_tokens(Config(training=Training(dataset_path=str(tmp_path / "spells.txt"), seq_len=8)))
    assert data.documents == 1


def test_default_tokenizer_is_trained_once_on_the_default_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "list_files", lambda dataset, path: list_files(dataset, path)[:3])
    first = tokens.open_tokenizer(Config())
    monkeypatch.setattr(tokens, "train_tokenizer", None)
    assert tokens.open_tokenizer(Config()).tokenizer.to_str() == first.tokenizer.to_str()


def test_second_preparation_reads_the_cache(config, monkeypatch):
    first = prepare_tokens(config)
    monkeypatch.setattr(tokens, "_tokenize", None)
    second = prepare_tokens(config)
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(first.ids, second.ids)


def test_documents_in_any_number_of_rounds_give_the_same_ids(config, monkeypatch, tmp_path):
    whole = prepare_tokens(config).ids
    monkeypatch.setattr(tokens, "_DOCUMENTS_AT_ONCE", 3)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "other"))
    assert np.array_equal(prepare_tokens(config).ids, whole)


@pytest.mark.parametrize("point", ["reading", "writing", "moving"])
def test_a_failure_in_the_middle_leaves_nothing_that_looks_finished(config, monkeypatch, point):
    def some_documents(files):
        yield _TEXTS[0]
        raise RuntimeError("in the middle")

    def half_a_file(file, ids):
        file.write(b"\x93NUMPY")
        raise RuntimeError("in the middle")

    def no_move(source, target):
        raise RuntimeError("in the middle")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="in the middle"):
        if point == "reading":
            broken.setattr(tokens, "read_documents", some_documents)
        elif point == "writing":
            broken.setattr(tokens.np, "save", half_a_file)
        else:
            broken.setattr(tokens.os, "replace", no_move)
        prepare_tokens(config)
    assert {path.suffix for path in tokens.cache_folder().iterdir()} == {".lock"}
    assert prepare_tokens(config).documents == len(_TEXTS)


def _prepare_slowly(config: Config, log: Path, ready, answers) -> None:
    quickly = tokens._tokenize

    def slowly(*arguments) -> None:
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.3)
        quickly(*arguments)

    tokens._tokenize = slowly
    ready.wait(timeout=60)
    data = prepare_tokens(config)
    answers.put((data.fingerprint, data.ids.tolist()))


def test_two_processes_at_once_make_one_file(config, tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, answers, log = context.Barrier(2), context.Queue(), tmp_path / "log"
    both = [context.Process(target=_prepare_slowly, args=(config, log, ready, answers)) for _ in range(2)]
    for process in both:
        process.start()
    first, second = answers.get(timeout=60), answers.get(timeout=60)
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert first == second
    assert log.read_text() == "made\n"
    assert sorted(path.suffix for path in tokens.cache_folder().iterdir()) == [".lock", ".npy"]


def test_fingerprint_follows_content_and_tokenizer_and_not_names(config, tmp_path, tokenizer_folder):
    before = prepare_tokens(config).fingerprint
    renamed = _config(tokenizer_folder, _jsonl(tmp_path / "renamed.jsonl", _TEXTS))
    assert prepare_tokens(renamed).fingerprint == before
    for texts in (["X", *_TEXTS[1:]], _TEXTS[::-1], _TEXTS[:-1]):
        changed = _config(tokenizer_folder, _jsonl(tmp_path / "changed.jsonl", texts))
        assert prepare_tokens(changed).fingerprint != before
    train_tokenizer(["other other other"]).save(str(tokenizer_folder / "tokenizer.json"))
    assert prepare_tokens(config).fingerprint != before


def test_data_shorter_than_one_sample_is_refused(config, tokenizer_folder):
    data = Path(config.training.dataset_path)
    count = len(prepare_tokens(config).ids)
    assert count_samples(prepare_tokens(_config(tokenizer_folder, data, seq_len=count - 1)), count - 1) == 1
    with pytest.raises(UserError, match=f"training.seq_len = {count}: the data of .training. has {count} tokens"):
        prepare_tokens(_config(tokenizer_folder, data, seq_len=count))


def test_data_of_no_documents_is_refused(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="0 tokens"):
        prepare_tokens(_config(tokenizer_folder, _jsonl(tmp_path / "none.jsonl", [])))


# ------------------------------------------------------------------------------------------------------------- batches

_SEQ_LEN = 8
_ROW = TokenData(
    np.arange(1, 30 * _SEQ_LEN + 2, dtype=np.uint16), vocabulary=2**16, documents=1, fingerprint="", byte_lengths=np.ones(2**16)
)


def _take(count: int, consumed: int = 0, local: int = 2, part: tuple[int, int] = (0, 1), seed: int = 0) -> list[torch.Tensor]:
    source = batches(_ROW, consumed, 8, local, _SEQ_LEN, seed, part, pin_memory=False)
    return list(itertools.islice(source, count))


def test_samples_share_one_token_and_cover_the_data():
    assert count_samples(_ROW, _SEQ_LEN) == 30
    samples = read_samples(_ROW, np.arange(30), _SEQ_LEN, seed=0)
    assert samples.shape == (30, _SEQ_LEN + 1)
    assert samples.dtype == torch.int64
    assert sorted(samples[:, :-1].flatten().tolist()) == _ROW.ids[:-1].tolist()


def test_labels_are_the_inputs_shifted_by_one():
    for batch in _take(5):
        inputs, labels = batch[..., :-1], batch[..., 1:]
        assert (labels == inputs + 1).all()  # the row counts upwards


def test_batch_has_the_shape_of_its_microbatches():
    for local, part, shape in ((8, (0, 1), (1, 8)), (2, (0, 1), (4, 2)), (2, (1, 2), (2, 2)), (1, (3, 4), (2, 1))):
        assert _take(1, local=local, part=part)[0].shape == (*shape, _SEQ_LEN + 1)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("local", [1, 2])
def test_global_batch_is_the_same_on_every_number_of_ranks(degree, local):
    parts = [_take(6, local=local, part=(rank, degree)) for rank in range(degree)]
    starts = sample_at(np.arange(6 * 8), 30, seed=0) * _SEQ_LEN
    for step in range(6):
        whole = torch.cat([part[step].flatten(0, 1) for part in parts])
        expected = [_ROW.ids[start : start + _SEQ_LEN + 1].tolist() for start in starts[8 * step : 8 * step + 8]]
        assert whole.tolist() == expected


@pytest.mark.parametrize("steps", [1, 3, 4, 50])
def test_starting_at_a_position_equals_having_consumed_so_far(steps):
    uninterrupted = _take(steps + 3, part=(1, 2))
    resumed = _take(3, consumed=8 * steps, part=(1, 2))
    assert torch.equal(torch.stack(uninterrupted[steps:]), torch.stack(resumed))


def test_position_outlives_a_change_of_the_global_batch():
    after = batches(_ROW, 24, 4, 4, _SEQ_LEN, 0, (0, 1), pin_memory=False)
    assert torch.equal(next(after)[0], _take(4, local=8)[3][0, :4])


def test_another_seed_gives_another_order():
    assert not torch.equal(_take(1)[0], _take(1, seed=1)[0])


def test_the_reading_thread_ends_with_the_iterator():
    before = threading.active_count()
    source = batches(_ROW, 0, 8, 2, _SEQ_LEN, 0, (0, 1), pin_memory=False)
    next(source)
    assert threading.active_count() == before + 1
    del source
    assert threading.active_count() == before


def test_a_share_that_does_not_divide_is_refused():
    for local, part in ((2, (0, 3)), (3, (0, 1))):
        with pytest.raises(AssertionError):
            _take(1, local=local, part=part)
