"""Muon on meshes: one rank orthogonalizes each full matrix, with the result of one process."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.mixtures import MARGIN
from tests.distributed.pool import Pool
from tests.distributed.scenarios import config_of, given_gradients, mesh_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO
from titanlite.config.schema import Config, Optimizer
from titanlite.optim import muon
from titanlite.optim.build import is_orthogonalized
from titanlite.optim.whole_matrices import Redistribution
from titanlite.parallel.mesh import ranks_of
from titanlite.transforms.shards import local_part
from titanlite.verify.compare import compare

HERE = "tests.distributed.test_muon"
MESHES = [
    {"dp_shard": 4},
    {"tp": 4},
    TWO_BY_TWO,
    {"dp_replicate": 2, "dp_shard": 2},
    pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param({"dp_shard": 8}, marks=pytest.mark.slow),
]
MUON = {"name": "Muon", "implementation": "for-loop"}  # the compiled one takes long to compile in every rank
MUON_KEYS = Optimizer(name="Muon")
BFLOAT16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}


def orthogonalized(degrees: dict[str, int], config: Config) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """The parameters after three steps with given gradients; and the shapes of the matrices that this rank orthogonalizes per
    step.
    """
    seen: list[Any] = []
    real = muon.orthogonalized

    def watched(matrices: Tensor, steps: int) -> Tensor:
        seen.extend([tuple(matrices.shape[1:])] * len(matrices))
        return real(matrices, steps)

    with patch.object(muon, "orthogonalized", watched):
        return given_gradients(degrees, config, 3, rate=1e-2), seen[: len(seen) // 3]


def expected_of(pools: dict[int, Pool], **sections: Any) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    return pools[1].run(f"{HERE}:orthogonalized", degrees=ONE, config=config_of(ONE, **sections))[0]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_same_gradients_give_the_same_parameters_bit_for_bit_and_no_matrix_is_computed_twice(pools, degrees):
    sections = {"optimizer": MUON}
    expected, every = expected_of(pools, **sections)
    config = config_of(degrees, **sections)
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:orthogonalized", degrees=degrees, config=config)
    for found, _ in ranks:
        assert_same(found, expected)
    counts = [len(shapes) for _, shapes in ranks]
    assert sorted(shape for _, shapes in ranks for shape in shapes) == sorted(every)
    assert max(counts) == math.ceil(len(every) / len(ranks))


@pytest.mark.slow  # inductor
def test_compiled_muon_gives_the_same_parameters(pools):
    muon_ = {"name": "Muon"}
    expected, _ = expected_of(pools, optimizer=muon_)
    config = config_of({"dp_shard": 2}, optimizer=muon_)
    found, _ = pools[2].run(f"{HERE}:orthogonalized", degrees={"dp_shard": 2}, config=config)[0]
    assert_same(found, expected)


OTHERS: dict[str, dict[str, Any]] = {"tied": {"model": {"flavor": "tied"}}, "bfloat16": {"training": BFLOAT16}}


@pytest.mark.parametrize("other", OTHERS)
def test_tied_weights_and_bfloat16_give_the_same_parameters(pools, other):
    sections = {"optimizer": MUON, **OTHERS[other]}
    expected, _ = expected_of(pools, **sections)
    config = config_of(TWO_BY_TWO, **sections)
    found, _ = pools[4].run(f"{HERE}:orthogonalized", degrees=TWO_BY_TWO, config=config)[0]
    assert_same(found, expected)


EXPERTS = {
    "shard 2": ({"dp_shard": 2}, "plain"),
    "2 x 2": (TWO_BY_TWO, "plain"),
    "shard 2, ep 2": ({"dp_shard": 2, "ep": 2}, "plain"),
    "shard 2, three experts": ({"dp_shard": 2}, "three"),  # ranks split their rows
}


@pytest.mark.parametrize("name", EXPERTS)
def test_each_expert_is_orthogonalized_on_its_own_by_one_rank(pools, name):
    degrees, flavor = EXPERTS[name]
    sections = {"model": {"name": "tests.tiny_moe", "flavor": flavor}, "optimizer": MUON}
    expected, every = expected_of(pools, **sections)
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:orthogonalized", degrees=degrees, config=config_of(degrees, **sections))
    for found, _ in ranks:
        assert_same(found, expected)
    assert sorted(shape for _, shapes in ranks for shape in shapes) == sorted(every)


def test_stages_with_experts_train_as_one_process(pools):
    degrees = {"pp": 2, "dp_shard": 2, "ep": 2}
    sections = {"model": {"name": "tests.tiny_moe"}, "optimizer": MUON, "training": {"steps": 3}}
    function = "tests.distributed.scenarios:trajectory"
    found, _ = pools[ranks_of(degrees)].run(function, degrees=degrees, config=config_of(degrees, "plain", 2, **sections))[0]
    alone = {"degrees": ONE, "config": config_of(ONE, **sections)}
    expected, margin = pools[1].run("tests.distributed.mixtures:with_margin", **alone)[0]
    assert margin > MARGIN, "choices depend on rounding"
    assert [str(each) for each in compare(found, expected).excessive] == []


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, except for PyTorch's fused AdamW, where a value's position in a vector register matters, and for stacks of
    experts: a batch of another length may use another kernel.
    """
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = 0.0 if is_orthogonalized(name.removesuffix(f".{muon.MOMENTUM}"), tensor, MUON_KEYS) else 1e-6
        atol = 1e-6 if tensor.ndim == 3 else tolerance / 100  # a ten-thousandth of the update: rounding grows 485-fold
        torch.testing.assert_close(found[name], tensor, rtol=max(tolerance, atol), atol=atol)


def exchanged(shapes: list[tuple[int, int]], used: list[int]) -> bool:
    """Whether matrices sharded by rows, also with fewer rows than ranks, return as their owners changed them."""
    mesh = mesh_of({"dp_shard": dist.get_world_size()})["dp_shard"]
    wholes = [torch.arange(rows * columns).view(rows, columns) + 1000.0 * n for n, (rows, columns) in enumerate(shapes)]
    matrices = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in wholes]
    exchange = Redistribution(matrices)
    good, met = True, []
    for one in exchange.buckets(used):
        shards = [local_part(matrices[n]) for n in one.parameters]
        parts = exchange.map(one, shards, lambda stack: stack + stack.sum(dim=(1, 2), keepdim=True))
        met += one.parameters
        for number, part in zip(one.parameters, parts, strict=True):
            expected = distribute_tensor(wholes[number] + wholes[number].sum(), mesh, [Shard(0)])
            good &= torch.equal(part, local_part(expected))
    return good and sorted(met) == used


@pytest.mark.parametrize("used", [[0, 1, 2, 3, 4, 5, 6], [1, 3, 5]])
def test_matrices_of_any_shape_are_sent_to_their_owners_and_back(pools, used):
    shapes = [(7, 5), (3, 4), (1, 6), (2, 2), (9, 1), (7, 5), (8, 8)]
    assert all(pools[4].run(f"{HERE}:exchanged", shapes=shapes, used=used))


def all_to_alls(shapes: list[tuple[int, ...]], dim: int) -> int:
    """The number of all-to-alls in a step, for parameters that are split along a dimension."""
    mesh = mesh_of({"dp_shard": dist.get_world_size()})["dp_shard"]
    stacks = [distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]) for shape in shapes]
    exchange = Redistribution(stacks)
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as calls:
        for one in exchange.buckets([*range(len(stacks))]):
            exchange.map(one, [local_part(stacks[n]) for n in one.parameters], lambda whole: whole)
    return calls.call_count


def test_unsplit_experts_are_not_sent_and_others_are_sent_once_each_rank_has_a_matrix(pools):
    stacks = [(8, 4, 6), (5, 4, 6), (3, 8, 6), (1, 8, 6)]
    assert pools[4].run(f"{HERE}:all_to_alls", shapes=stacks, dim=0) == [0] * 4
    assert pools[4].run(f"{HERE}:all_to_alls", shapes=stacks, dim=1) == [2 * 3] * 4  # (8, 4, 6), (5, 4, 6), the others
