"""Several sources as one: how often each may be read, and what their mixture is, so that a change of it is noticed."""

import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.token_files import TEXTS, mix_of, opened, write_file, write_jsonl
from titanlite.config.schema import Config
from titanlite.data.mixture import USED_UP, check_epochs, open_data
from titanlite.data.order import drawn
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import load_tokenizer, train_tokenizer
from titanlite.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def assets(tmp_path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    train_tokenizer(TEXTS).save(str(folder / "tokenizer.json"))
    return folder


# --------------------------------------------------------------------------------------------------------------- epochs


def test_a_run_that_would_read_a_source_too_often_is_refused(tmp_path):
    config = Config.model_validate({"training": {"seq_len": 8}})
    limited = opened(write_file(tmp_path / "limited", [[1] * 81]), "limited", weight=1, epochs=1.5)  # 10 samples
    free = opened(write_file(tmp_path / "free", [[1] * 81]), "free", weight=1)
    data = mix_of([free, limited], config)
    allowed = next(samples for samples in range(100) if drawn(samples, data.shares)[1] > 15) - 1
    assert allowed in (30, 31)
    check_epochs(data, allowed)
    with pytest.raises(UserError, match=r"limited: 1\.60 epochs"):
        check_epochs(data, allowed + 1)
    with pytest.raises(UserError) as error:
        check_epochs(data, 40)
    assert "limited: 2.00 epochs of 10 samples, allowed are 1.5" in str(error.value)
    assert "free" not in str(error.value)


def test_a_source_that_is_used_up_is_told_where_the_sample_is_read_and_not_where_it_is_located(tmp_path):
    config = Config.model_validate({"training": {"seq_len": 8}})
    limited = opened(write_file(tmp_path / "limited", [[1] * 81]), "limited", epochs=1.5)  # 10 samples
    free = opened(write_file(tmp_path / "free", [[1] * 81]), "free")
    data = mix_of([free, limited], config)
    source, sample = data.locate(np.arange(60), seed=0)
    assert sorted(sample[source == 1][:10].tolist()) == list(range(10))
    assert (sample[source == 1] == USED_UP).tolist() == [False] * 15 + [True] * 15
    assert (sample[source == 0] >= 0).all()
    usable = sample != USED_UP
    data.read(source[usable], sample[usable])
    with pytest.raises(UserError, match=r"training.sources: limited is used up: 1.5 epochs of it are allowed"):
        data.read(source[~usable][:1], sample[~usable][:1])


def test_every_source_that_would_be_read_too_often_is_told(tmp_path):
    files = [opened(write_file(tmp_path / name, [[1] * 81]), name, epochs=1) for name in ("a", "b")]
    data = mix_of(files, Config.model_validate({"training": {"seq_len": 8}}))
    check_epochs(data, 20)
    with pytest.raises(UserError) as error:
        check_epochs(data, 24)
    assert "a: 1.20 epochs" in str(error.value) and "b: 1.20 epochs" in str(error.value)


# ---------------------------------------------------------------------------------------------------------------- opens


_opens: list[str] | None = None  # the files that this process opens, while a test counts them


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opens is not None and event == "open" and isinstance(arguments[0], str | Path):
        _opens.append(str(arguments[0]))


sys.addaudithook(_note)  # for good: Python has no way to take it back


@pytest.fixture
def opens(monkeypatch) -> list[str]:
    monkeypatch.setattr(sys.modules[__name__], "_opens", [])
    assert _opens is not None
    return _opens


@pytest.mark.parametrize("policy", ["pack", "best_fit"])
def test_only_the_process_that_opens_the_data_opens_every_file(tmp_path, assets, opens, policy):
    """A worker, or another rank of the node, opens only the files that it reads, each once."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(4):
        write_file(folder / str(number), [[number + 1] * 64])
    opens.clear()
    training = {"seq_len": 16, "dataset_path": str(folder), "document_policy": policy}
    data = open_data(Config.model_validate({"training": training, "model": {"hf_assets_path": str(assets)}}))
    counts = Counter(path for path in opens if path.startswith(str(folder)))
    assert {path.rpartition("/")[2] for path in counts} == {f"{n}.{suffix}" for n in range(4) for suffix in ("bin", "idx")}
    assert max(counts.values()) <= (2 if policy == "pack" else 4)  # the header and the fingerprint; best_fit packs it, too
    travelled = pickle.dumps(data)
    opens.clear()
    again = pickle.loads(travelled)
    assert again.fingerprint == data.fingerprint and again.describe() == data.describe()
    assert opens == []
    samples = np.arange(data.sources[0].count)
    first = samples[: data.sources[0].ends[0]]
    tokens = again.read(np.zeros_like(first), first).tokens
    assert (tokens == 1).any() and (tokens <= 1).all()
    assert [Path(path).name for path in opens if path.startswith(str(folder))] == ["0.bin"]
    everything = np.zeros_like(samples), samples
    assert np.array_equal(again.read(*everything).tokens, data.read(*everything).tokens)


# ------------------------------------------------------------------------------------------------------------- together


def test_data_of_a_configuration_is_its_sources_with_tokenizer_and_bytes(tmp_path, assets):
    loaded, tokenized = load_tokenizer(str(assets)), tmp_path / "tokenized"
    text = str(write_jsonl(tmp_path / "for-tokenized.jsonl"))
    prepare.prepare([text], tokenized, loaded, append_eos=True, workers=1, shard_tokens=1000, on_error="fail")
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:30])
    write_file(tmp_path / "theirs", [[*loaded.tokenizer.encode(text).ids, loaded.end_of_text] for text in TEXTS[30:]])
    paths = [tokenized, tmp_path / "a.jsonl", tmp_path / "theirs"]
    training = {"seq_len": 16, "sources": [{"path": str(path)} for path in paths]}
    data = open_data(Config.model_validate({"training": training, "model": {"hf_assets_path": str(assets)}}))
    described = data.describe()["sources"]
    assert [entry["name"] for entry in described] == ["tokenized", "a.jsonl", "theirs"]
    assert [entry["documents"] for entry in described] == [40, 30, 10]
    ids = np.concatenate([rows.file.ids for rows in data.sources[0].rows])
    assert data.byte_lengths[ids].sum() == sum(len(text.encode()) for text in TEXTS)
    assert data.read(*data.locate(np.arange(50), seed=0)).tokens.shape == (50, 17)


def test_fingerprint_of_data_follows_tokenizer_sources_and_weights(tmp_path, assets):
    for name, texts in {"a": TEXTS[:20], "b": TEXTS[20:]}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", texts)

    def fingerprint(*weights: float, names: str = "ab") -> str:
        entries = [{"path": str(tmp_path / f"{n}.jsonl"), "weight": w} for n, w in zip(names, weights, strict=True)]
        training = {"seq_len": 16, "sources": entries}
        return open_data(Config.model_validate({"training": training, "model": {"hf_assets_path": str(assets)}})).fingerprint

    first = fingerprint(1, 1)
    assert fingerprint(2, 2) == first
    found = {first, fingerprint(1, 2), fingerprint(1, 1, names="ba"), fingerprint(1, names="a")}
    train_tokenizer(TEXTS[:3]).save(str(assets / "tokenizer.json"))
    assert len(found | {fingerprint(1, 1)}) == 5


def test_fingerprint_of_data_follows_the_tokenizer_where_files_do_not_tell_which_one_made_them(tmp_path, assets):
    path = write_file(tmp_path / "theirs", [[1] * 50]).prefix
    keys = {"training": {"seq_len": 16, "dataset_path": str(path)}, "model": {"hf_assets_path": str(assets)}}
    before = open_data(Config.model_validate(keys)).fingerprint
    assert open_data(Config.model_validate(keys)).fingerprint == before
    train_tokenizer(TEXTS[:3]).save(str(assets / "tokenizer.json"))
    assert open_data(Config.model_validate(keys)).fingerprint != before
