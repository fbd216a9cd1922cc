"""Nodes that would train different runs: every key of the schema, the code, the versions; and how ranks report it."""

import datetime
import threading
from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
import torch.distributed as dist

from tests.hostile.keys import ALTERNATIVES, kind_of, other, toml
from tests.hostile.keys import setting as without
from titanlite.config.effects import Hardware
from titanlite.config.read import KEYS, read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.launch import agreement
from titanlite.launch.agreement import Identity, agree, differences, identity

COULD_DIFFER = ("training.dataset_path", "training.dataset", "validation.dataset_path", "validation.dataset")
ONE_OF_EACH_KIND = [*{kind_of(ALTERNATIVES[key]): key for key in reversed(KEYS)}.values(), *COULD_DIFFER, "job.dump_folder"]
# Values of keys of which only a part may differ between nodes.
OTHERS = dict.fromkeys(("training.sources", "validation.sources"), '[{ path = "text", weight = 2.0 }]')


@pytest.fixture
def read(tmp_path) -> Callable[[dict[str, str]], Config]:
    def one(settings: dict[str, str]) -> Config:
        (tmp_path / "run.toml").write_text(toml(settings))
        return read_config(tmp_path / "run.toml", [])

    return one


def of(config: Config, hardware: Hardware) -> Identity:
    return identity(config.settled(hardware), "cpu", {}, {})


@pytest.fixture(autouse=True)
def no_code(monkeypatch, request) -> None:
    """Avoids reading titanlite's files for every key."""
    if "key" in request.fixturenames:
        monkeypatch.setattr(agreement, "_files", dict)


@pytest.mark.parametrize("key", ONE_OF_EACH_KIND)
def test_another_value_on_one_node_is_refused_by_its_key_or_has_no_effect(key, read):
    section, name = key.split(".")
    accumulating = {"training.global_batch_size": "64"}
    all_hold = {other: value for other, value in (accumulating | without(key, "none")).items() if other != key}
    refused = False
    for hardware in (Hardware(False, 2), Hardware(True, 2)):
        for settings in ({}, all_hold):
            one, two = read(settings), read(settings | {key: OTHERS.get(key) or other(key)})
            values = [getattr(getattr(config.settled(hardware), section), name) for config in (one, two)]
            lines = differences(of(one, hardware), of(two, hardware), "node 0", "node 1")
            if values[0] == values[1]:
                assert lines == []
            elif any(fnmatchcase(key, pattern) for pattern in agreement.PER_NODE):
                assert not any(f"has {key} " in line for line in lines)
            else:
                assert any(line.startswith(f"node 1 has {key}") and ", node 0 has " in line for line in lines), lines
                refused = True
    paths = {"job.dump_folder", "model.hf_assets_path"} | set(COULD_DIFFER)
    assert refused == (key not in paths)


def test_only_the_path_of_a_source_may_differ(read):
    hardware, first = Hardware(False, 2), {"training.sources": '[{ path = "a", weight = 2.0 }, { path = "b", weight = 1.0 }]'}
    moved = {"training.sources": '[{ path = "/local/a", weight = 2.0 }, { path = "b", weight = 1.0 }]'}
    heavier = {"training.sources": '[{ path = "a", weight = 2.0 }, { path = "b", weight = 3.0 }]'}
    fewer = {"training.sources": '[{ path = "a", weight = 2.0 }]'}
    found = [
        differences(of(read(first), hardware), of(read(each), hardware), "node 0", "node 1") for each in (moved, heavier, fewer)
    ]
    assert found[0] == []
    assert found[1] == ["node 1 has training.sources.1.weight = 3.0, node 0 has 1.0"]
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
    assert (
        meet([first, first, second, first])
        == [
            "UserError: the nodes do not start the same run:\n  rank 2 has a = 3, rank 0 has 1\n"
            "Start every node with the same command, code and version of PyTorch"
        ]
        * 4
    )
    monkeypatch.setenv("GROUP_RANK", "7")  # of all in this process
    (text,) = set(meet([first, second, second]))
    assert text.count("node 7 has a = 3, node 7 has 1") == 1


def test_a_missing_rank_is_named():
    expected = "TimeoutError: ranks that did not start within comm.init_timeout_seconds: "
    assert meet([{}, None, {}], seconds=0.5) == [f"{expected}1", "never ended", f"{expected}1"]
    assert meet([None, {}, {}], seconds=0.5)[1:] == [f"{expected}0"] * 2
