"""Several sources as one: how often each may be read, and their mixture."""

import logging

import numpy as np
import pytest

from tests.token_files import TEXTS, mix_of, opened, write_file, write_jsonl
from titanlite.config.schema import Config
from titanlite.data.mixture import check_epochs, open_data
from titanlite.data.order import MIXTURE, drawn
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.ground.errors import UserError
from titanlite.registry.family import vocabulary_of

pytestmark = pytest.mark.usefixtures("cache")


# --------------------------------------------------------------------------------------------------------------- epochs


def test_samples_that_replace_those_of_a_rollback_do_not_count_as_epochs(tmp_path, caplog, monkeypatch):
    """Also if the mixture rounds, and after several rollbacks: exactly what fitted at the start still fits."""
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    config = Config.model_validate({"training": {"seq_len": 8}})
    names = {"a": (7.0, 40 / 30), "b": (2.0, 1.0), "c": (1.0, 5.0)}
    files = [opened(write_file(tmp_path / n, [[1] * 241]), n, weight=w, epochs=e) for n, (w, e) in names.items()]
    data = mix_of(files, config)  # 30 samples each
    run = data.timeline(1)
    steps = next(step for step in range(200) if drawn(step + 1, data.shares)[0] > 40)
    check_epochs(data, run, steps)
    for left_out in (1, 4, 12):
        run = run.rolled_back(10, 10 + left_out)
        caplog.clear()
        caplog.set_level(logging.INFO)
        check_epochs(data, run, steps)
        assert (
            "a: reads " in caplog.text and "beyond its 1.33333 epochs, instead of those that rollbacks left out" in caplog.text
        )
        with pytest.raises(UserError, match=r"a: 1\.37 epochs"):
            check_epochs(data, run, steps + 1)


# ------------------------------------------------------------------------------------------------------------- together


def test_fingerprint_of_data_follows_tokenizer_sources_and_weights(tmp_path, assets):
    for name, texts in {"a": TEXTS[:20], "b": TEXTS[20:]}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", texts)

    def fingerprint(*weights: float, names: str = "ab") -> str:
        entries = [{"path": str(tmp_path / f"{n}.jsonl"), "weight": w} for n, w in zip(names, weights, strict=True)]
        training = {"seq_len": 16, "sources": entries}
        config = Config.model_validate({"training": training, "model": {"hf_assets_path": str(assets)}})
        return open_data(config, vocabulary_of(config.model)).fingerprint

    first = fingerprint(1, 1)
    assert fingerprint(2, 2) == first
    found = {first, fingerprint(1, 2), fingerprint(1, 1, names="ba"), fingerprint(1, names="a")}
    train_tokenizer(TEXTS[:3]).save(str(assets / "tokenizer.json"))
    assert len(found | {fingerprint(1, 1)}) == 5


def test_sources_may_have_any_sizes(tmp_path, assets):
    write_file(tmp_path / "small", [[1, 1]])
    write_file(tmp_path / "large", [np.ones(3_000_001)])
    entries = [{"path": str(tmp_path / name)} for name in ("small", "large")]
    keys = {"model": {"hf_assets_path": str(assets)}, "training": {"seq_len": 1, "sources": entries}}
    config = Config.model_validate(keys | {"validation": {"enable": True, "sources": entries}})
    for section in ("training", "validation"):
        data = open_data(config, vocabulary_of(config.model), section)
        assert [mixed.samples for mixed in data.sources] == [1, 3_000_000] and data.shares == [1, MIXTURE - 2]
        assert sum(data.locate(np.arange(MIXTURE - 1), 0, data.timeline(1).segments[0])[0] == 0) == 1
