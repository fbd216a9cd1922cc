"""Several sources as one: how often each may be read, and what their mixture is, so that a change of it is noticed."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.token_files import TEXTS, mix_of, opened, write_file, write_jsonl
from titanlite.config.schema import Config, Source
from titanlite.data.batches import StepDataset
from titanlite.data.mixture import Data, check_epochs, open_data
from titanlite.data.order import drawn, sample_at
from titanlite.data.origin import Origin, continued
from titanlite.data.prepare import prepare
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.sources import TokenSource
from titanlite.data.tokenizer import load_tokenizer
from titanlite.ground.errors import UserError


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
    check_epochs(data, data.beginning(), allowed)
    with pytest.raises(UserError, match=r"limited: 1\.60 epochs"):
        check_epochs(data, data.beginning(), allowed + 1)
    with pytest.raises(UserError) as error:
        check_epochs(data, data.beginning(), 40)
    assert "limited: 2.00 epochs of 10 samples, allowed are 1.5" in str(error.value)
    assert "free" not in str(error.value)


def test_samples_that_replace_those_of_a_rollback_do_not_count_as_epochs(tmp_path, caplog, monkeypatch):
    """Also where the mixture rounds, and after several rollbacks: what fitted at the start still fits, and no more."""
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    config = Config.model_validate({"training": {"seq_len": 8}})
    names = {"a": (7.0, 40 / 30), "b": (2.0, 1.0), "c": (1.0, 5.0)}
    files = [opened(write_file(tmp_path / n, [[1] * 241]), n, weight=w, epochs=e) for n, (w, e) in names.items()]
    data = mix_of(files, config)  # 30 samples each
    origin = data.beginning()
    end = next(end for end in range(200) if data.drawn(origin, end + 1)[0] > 40)
    check_epochs(data, origin, end)
    for left_out in (1, 3, 8):
        origin = data.extended(origin, end, end + left_out)
        end += left_out
        caplog.clear()
        caplog.set_level(logging.INFO)
        check_epochs(data, origin, end)
        assert (
            "a: reads " in caplog.text and "beyond its 1.33333 epochs, instead of those that rollbacks left out" in caplog.text
        )
        with pytest.raises(UserError, match=r"a: 1\.37 epochs"):
            check_epochs(
                data, origin, next(e for e in range(end, 300) if data.drawn(origin, e)[0] > data.drawn(origin, end)[0])
            )


# ------------------------------------------------------------------------------------------------------ another mixture


SEQ_LEN, BATCH = 8, 12


def numbers_of(data: Data, origin: Origin, samples: int) -> dict[str, Any]:
    """What a manifest holds of the data."""
    return json.loads(json.dumps({"samples": samples, "data": data.describe(), "mixture": origin.numbers()}))


def read(data: Data, config: Config, origin: Origin, samples: int, steps: int, ranks: int) -> dict[str, list[int]]:
    """Fingerprint of each source -> the first token of its samples, in the order of the global batches."""
    plans = [StepDataset(config, data, samples, BATCH, (rank, ranks), origin) for rank in range(ranks)]
    found: dict[str, list[int]] = {mixed.source.fingerprint: [] for mixed in data.sources}
    for step, plan in itertools.product(range(steps), plans):
        tokens = data.read(*plan.located(step)).tokens[:, 0]
        for source, token in zip(plan.located(step)[0], tokens.tolist(), strict=True):
            found[data.sources[source].source.fingerprint].append(token)
    return found


@pytest.fixture
def parts(tmp_path) -> dict[str, TokenSource]:
    """Three sources of 500, 300 and 200 samples, with tokens that tell samples apart."""
    sizes = {"a": 500, "b": 300, "c": 200}
    return {name: opened(write_file(tmp_path / name, [np.arange(n * SEQ_LEN + 1)]), name) for name, n in sizes.items()}


def weighted(parts: dict[str, TokenSource], config: Config, **weights: float) -> Data:
    return mix_of([parts[n]._replace(cfg=Source(path=n, weight=w)) for n, w in weights.items()], config)


def test_after_changes_of_weights_and_sources_each_source_continues_with_its_next_sample_on_any_number_of_ranks(parts):
    config = Config.model_validate({"training": {"seq_len": SEQ_LEN, "local_batch_size": 1}})
    parts["renamed"] = parts["a"]._replace(name="renamed")
    phases: list[tuple[dict[str, float], int, int]] = [  # weights, steps, ranks
        ({"a": 1, "b": 1}, 10, 1),
        ({"a": 1, "b": 1}, 3, 4),
        ({"a": 9, "b": 1}, 7, 2),
        ({"b": 1, "a": 9}, 4, 1),
        ({"b": 2, "c": 1}, 10, 3),
        ({"b": 2, "c": 1}, 2, 2),
        ({"c": 1, "renamed": 3, "b": 1}, 20, 4),
        ({"renamed": 1}, 5, 2),
    ]
    seen: dict[str, list[int]] = {parts[name].fingerprint: [] for name in "abc"}
    samples, numbers, orders = 0, None, []
    for weights, steps, ranks in phases:
        data = weighted(parts, config, **weights)
        origin = data.beginning() if numbers is None else continued(numbers, data.describe()["sources"])
        for fingerprint, tokens in read(data, config, origin, samples, steps, ranks).items():
            seen[fingerprint] += tokens
        samples += steps * BATCH
        numbers = numbers_of(data, origin, samples)
        orders.append([reached.order for reached in origin.sources])
        assert data.drawn(origin, samples) == [len(seen[mixed.source.fingerprint]) for mixed in data.sources]
    assert orders == [[0, 1], [0, 1], [0, 1], [1, 0], [1, 2, 0], [1, 2, 0], [2, 0, 1], [0, 2, 1]]
    assert sum(len(tokens) for tokens in seen.values()) == samples
    for number, (name, count) in enumerate({"a": 500, "b": 300, "c": 200}.items()):
        tokens = seen[parts[name].fingerprint]
        assert tokens == (sample_at(np.arange(len(tokens)), count, f"0/{number}") * SEQ_LEN).tolist()  # none skipped
        assert len(set(tokens)) == len(tokens) > 50  # none repeated


def test_a_change_of_weights_after_a_million_samples_moves_no_source(parts):
    config = Config.model_validate({"training": {"seq_len": SEQ_LEN}})
    before, after = weighted(parts, config, a=1, b=1), weighted(parts, config, a=9, b=1)
    numbers = numbers_of(before, before.beginning(), 1_000_000)
    origin = continued(numbers, after.describe()["sources"])
    assert [reached.drawn for reached in origin.sources] == [500_000, 500_000]
    assert after.drawn(origin, 1_000_010) == [500_009, 500_001]


def test_two_sources_of_the_same_text_keep_their_own_places(parts):
    config = Config.model_validate({"training": {"seq_len": SEQ_LEN}})
    parts["again"] = parts["a"]._replace(name="again")
    before, after = weighted(parts, config, a=3, again=1), weighted(parts, config, a=1, again=1, b=1)
    origin = continued(numbers_of(before, before.beginning(), 400), after.describe()["sources"])
    assert [(reached.order, reached.drawn) for reached in origin.sources] == [(0, 299), (1, 101), (2, 0)]


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
    ids = np.concatenate([rows.file.ids[:] for rows in data.sources[0].rows])
    assert data.byte_lengths[ids].sum() == sum(len(text.encode()) for text in TEXTS)
    assert data.read(*data.locate(np.arange(50), 0, data.beginning())).tokens.shape == (50, 17)


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


def test_validation_measures_sources_of_any_sizes_and_a_mixture_without_weights_refuses_them(tmp_path, assets):
    write_file(tmp_path / "small", [[1, 1]])
    write_file(tmp_path / "large", [np.ones(3_000_001)])
    entries = [{"path": str(tmp_path / name)} for name in ("small", "large")]
    keys = {"model": {"hf_assets_path": str(assets)}, "training": {"seq_len": 1, "sources": entries}}
    config = Config.model_validate(keys | {"validation": {"enable": True, "sources": entries}})
    data = open_data(config, "validation")
    assert [mixed.count for mixed in data.sources] == [1, 3_000_000] and data.fingerprint
    with pytest.raises(UserError, match=r"training\.sources"):
        open_data(config)
