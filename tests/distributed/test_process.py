"""A process among others: how long it waits for them, and its random numbers."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool
from tests.distributed.scenarios import mesh_of
from tests.waiting import until
from titanlite.config.operation import Comm
from titanlite.config.schema import Config, Source, Training
from titanlite.data import mixture
from titanlite.data.sources import TokenSource
from titanlite.ground import torch_private
from titanlite.ground.errors import UserError
from titanlite.launch.process import once_per_node, rank_and_world, same_everywhere, seed_step, set_timeout, start
from titanlite.parallel.mesh import rng_rank

HERE = "tests.distributed.test_process"


def wait_for_a_late_rank(gave_up: Path) -> str:
    """The error of rank 0 when it stops waiting; rank 1 does not take part."""
    mesh = mesh_of({"tp": 2})
    set_timeout(2)
    if dist.get_rank() == 1:
        until(gave_up.exists)
        return ""
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
    gave_up.touch()
    return str(raised.value)


def test_a_group_of_the_mesh_waits_no_longer_than_its_timeout(tmp_path):
    """test_stop.py reads the timeouts of the other groups."""
    pool = Pool(2)
    try:
        message = pool.run(f"{HERE}:wait_for_a_late_rank", gave_up=tmp_path / "gave-up")[0]
    finally:
        pool.stop()
    assert "Timed out waiting 2000ms" in message


def test_a_process_without_torchrun_is_a_group_of_one_with_the_configured_timeout_and_one_gloo_thread(monkeypatch):
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", torch_private._make_gloo_group)  # PyTorch's own
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    config = Config(comm=Comm(init_timeout_seconds=77), training=Training(deterministic=True))
    try:
        device = start(config, {})
        assert rank_and_world() == (0, 1)
        assert dist.get_world_size() == 1
        backends = [group._get_backend(device) for group in (dist.group.WORLD, dist.new_group([0]))]
        assert backends[0].options._timeout.total_seconds() == 77
        assert [backend.options._threads for backend in backends] == [1, 1]  # with two, gloo damages the heap
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        dist.destroy_process_group()


def draw(seed: int, step: int, part: int) -> list[float]:
    seed_step(seed, step, part)
    return torch.rand(4).tolist()


def test_random_numbers_are_a_function_of_seed_step_and_part_alone():
    first = draw(1, 2, 3)
    others = [draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4)]
    assert draw(1, 2, 3) == first
    assert all(other != first for other in others)


def rng_rank_on(degrees: dict[str, int]) -> int:
    return rng_rank(mesh_of(degrees))


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_no_two_ranks_draw_the_same_random_numbers(pools: dict[int, Pool], degrees):
    assert sorted(pools[4].run(f"{HERE}:rng_rank_on", degrees=degrees)) == [0, 1, 2, 3]


def is_same(text: str, odd_rank: int) -> bool:
    return same_everywhere(text if dist.get_rank() != odd_rank else "another")


def test_all_ranks_notice_that_one_has_another_text(pools: dict[int, Pool], tmp_path: Path):
    assert pools[4].run(f"{HERE}:is_same", text="data", odd_rank=-1) == [True] * 4
    assert pools[4].run(f"{HERE}:is_same", text="data", odd_rank=2) == [False] * 4


def make_on_nodes_of_two(fault_on: int | None) -> tuple[int | str, list[int]]:
    """(the result of once_per_node or its error message, the ranks whose `make` was called here), with 2 ranks per node."""
    rank, calls = dist.get_rank(), []

    def make() -> int:
        calls.append(rank)
        if rank == fault_on:
            raise UserError(f"no data on the node of rank {rank}")
        return 100 + rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % 2))
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        try:
            return once_per_node(make), calls
        except UserError as error:
            return str(error), calls


def test_the_first_rank_of_each_node_makes_a_value_for_its_node(pools: dict[int, Pool]):
    for _ in range(2):  # groups of the same ranks can be created again
        answers = pools[4].run(f"{HERE}:make_on_nodes_of_two", fault_on=None)
        assert answers == [(100, [0]), (100, []), (102, [2]), (102, [])]


def test_all_ranks_of_a_node_raise_the_error_of_its_first_rank(pools: dict[int, Pool]):
    answers = pools[4].run(f"{HERE}:make_on_nodes_of_two", fault_on=2)
    fault = "no data on the node of rank 2"
    assert answers == [(100, [0]), (100, []), (fault, [2]), (fault, [])]


def open_with_a_slow_node() -> list[float]:
    """The timeouts after data was opened that the node of rank 1 tokenizes for longer than comm.init_timeout_seconds."""
    config = Config(comm=Comm(init_timeout_seconds=1))
    set_timeout(1)

    def open_data(*_: object) -> SimpleNamespace:
        time.sleep(3 * dist.get_rank())
        text = TokenSource(Source(path="text.txt"), "text", [], "the same", Path("cache"))
        return SimpleNamespace(sources=[text], fingerprint="the same")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setattr(mixture, "open_data", open_data)
        mixture.open_on_every_rank(config, 8)
    groups = [group._get_backend(torch.device("cpu")) for group in torch_private.all_groups]
    return [group.options._timeout.total_seconds() for group in groups]


def test_a_node_waits_for_another_that_tokenizes_longer_than_the_timeout_of_the_start():
    pool = Pool(2)
    try:
        assert pool.run(f"{HERE}:open_with_a_slow_node") == [[1], [1]]
    finally:
        pool.stop()
