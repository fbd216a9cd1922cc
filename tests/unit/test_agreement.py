"""Nodes that would train different runs: every key of the schema, the code, the versions; and how ranks report it."""

import datetime
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.hostile.keys import other, toml
from titanlite.config.effects import Hardware
from titanlite.config.read import KEYS, read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.launch import agreement
from titanlite.launch.agreement import Identity, agree, differences, identity

# Each node may have the same files under another path; data have a fingerprint, which is compared too.
MAY_DIFFER = {"job.dump_folder", "model.hf_assets_path", "distillation.teacher", *(key for key in KEYS if ".dataset" in key)}
SOURCES = ("training.sources", "validation.sources")  # the weight of a source may not differ


@pytest.fixture
def read(tmp_path) -> Callable[[dict[str, str]], Identity]:
    def one(settings: dict[str, str]) -> Identity:
        (tmp_path / "run.toml").write_text(toml(settings))
        return identity(read_config(tmp_path / "run.toml", []).settled(Hardware(False, 2)), "cpu", {}, {})

    return one


def test_another_value_of_any_key_but_a_path_is_refused_on_one_node_by_its_key(monkeypatch, tmp_path):
    monkeypatch.setattr(agreement, "_files", dict)  # reading titanlite's files for every key takes long
    differ = set()
    for key in KEYS:
        value = '[{ path = "text", weight = 2.0 }]' if key in SOURCES else other(key)
        (tmp_path / "run.toml").write_text(toml({key: value}))
        plain, changed = (identity(config, "cpu", {}, {}) for config in (Config(), read_config(tmp_path / "run.toml", [])))
        lines = differences(plain, changed, "node 0", "node 1")
        assert all(line.startswith(f"node 1 has {key}") and ", node 0 has " in line for line in lines), lines
        differ |= {key} if lines else set()
    assert set(KEYS) - differ == MAY_DIFFER


def test_a_value_without_effect_may_differ(read):
    rank, enabled = {"lora.rank": "4"}, {"lora.enable": "true"}
    assert differences(read({}), read(rank), "node 0", "node 1") == []
    (line,) = differences(read(enabled), read(enabled | rank), "node 0", "node 1")
    assert line.startswith("node 1 has lora.rank = 4")


def test_only_the_path_of_a_source_may_differ(read):
    first = read({"training.sources": '[{ path = "a", weight = 2.0 }, { path = "b", weight = 1.0 }]'})
    moved = read({"training.sources": '[{ path = "/local/a", weight = 2.0 }, { path = "b", weight = 1.0 }]'})
    heavier = read({"training.sources": '[{ path = "a", weight = 2.0 }, { path = "b", weight = 3.0 }]'})
    fewer = read({"training.sources": '[{ path = "a", weight = 2.0 }]'})
    found = [differences(first, each, "node 0", "node 1") for each in (moved, heavier, fewer)]
    assert found[:2] == [[], ["node 1 has training.sources.1.weight = 3.0, node 0 has 1.0"]]
    assert "node 1 has training.sources.1.weight = unset, node 0 has 1.0" in found[2]


def test_code_dimensions_device_and_version_are_compared(monkeypatch):
    first = identity(Config(), "cpu", {"dim": 64}, {"own.model": "1f"})
    monkeypatch.setattr(agreement.torch, "__version__", "1.0")
    second = identity(Config(), "cuda", {"dim": 32}, {"own.model": "2f"})
    assert differences(first, second, "node 0", "node 3") == [
        "node 3 has architecture.dim = 32, node 0 has 64",
        'node 3 has code.own.model = "2f", node 0 has "1f"',
        'node 3 has device = "cuda", node 0 has "cpu"',
        f'node 3 has torch = "1.0", node 0 has {first["torch"]}',
    ]
    assert "code.titanlite/train.py" in first and len({key for key in first if key.startswith("code.titanlite/")}) > 80


# ------------------------------------------------------------------------------------------------------------------- ranks


def meet(identities: list[Identity | None], seconds: float = 30.0) -> list[str]:
    """The error of each rank, "" for none; None: it does not take part."""
    store, results = dist.HashStore(), ["never ended"] * len(identities)
    store.set_timeout(datetime.timedelta(seconds=seconds))

    def one(rank: int, own: Identity) -> None:
        try:
            results[rank] = agree(store, rank, len(identities), own) or ""
        except (UserError, TimeoutError) as error:
            results[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(rank, own)) for rank, own in enumerate(identities) if own is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_ranks_get_the_same_message_with_each_difference_once(monkeypatch):
    first, second = {"a": "1", "b": "2"}, {"a": "3", "b": "2"}
    (text,) = set(meet([first, first, second, first]))
    assert text.startswith("UserError: ") and text.count("rank 2 has a = 3, rank 0 has 1") == 1
    monkeypatch.setenv("GROUP_RANK", "7")  # of all in this process
    (text,) = set(meet([first, second, second]))
    assert text.count("node 7 has a = 3, node 7 has 1") == 1


def test_a_missing_rank_is_named():
    expected = "TimeoutError: ranks that did not start within comm.init_timeout_seconds: "
    assert meet([{}, None, {}], seconds=0.5) == [f"{expected}1", "never ended", f"{expected}1"]
    assert meet([None, {}, {}], seconds=0.5)[1:] == [f"{expected}0"] * 2
