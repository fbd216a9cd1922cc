"""Muon on meshes: every matrix is orthogonalized whole, by one rank, and that is what one process does."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.pool import Pool
from tests.distributed.scenarios import config_of, given_gradients, mesh_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO
from tests.repetitions import slow_but
from titanlite.config.schema import Config, Optimizer
from titanlite.optim import muon
from titanlite.optim.build import is_orthogonalized
from titanlite.optim.whole_matrices import Redistribution
from titanlite.parallel.mesh import ranks_of
from titanlite.plan.predict import predict
from titanlite.registry.family import load_family
from titanlite.transforms.shards import local_part

HERE = "tests.distributed.test_muon"
EVERYTHING = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
MESHES = [
    {"dp_shard": 4},
    {"tp": 4},
    TWO_BY_TWO,
    {"dp_replicate": 2, "dp_shard": 2},
    pytest.param(EVERYTHING, marks=pytest.mark.slow),
    pytest.param({"dp_shard": 8}, marks=pytest.mark.slow),
]
MUON = {"name": "Muon", "implementation": "for-loop"}  # the compiled one takes long to compile in every rank
MUON_KEYS = Optimizer(name="Muon")
BFLOAT16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}


def orthogonalized(degrees: dict[str, int], config: Config) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """What three steps with given gradients make; and the shapes of the matrices that this rank orthogonalizes in one."""
    seen: list[Any] = []
    real = muon.orthogonalized

    def watched(matrix: Tensor, steps: int) -> Tensor:
        seen.append(tuple(matrix.shape))
        return real(matrix, steps)

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
def test_the_compiled_one_does_so_too(pools):
    muon_ = {"name": "Muon"}
    expected, _ = expected_of(pools, optimizer=muon_)
    config = config_of({"dp_shard": 2}, optimizer=muon_)
    found, _ = pools[2].run(f"{HERE}:orthogonalized", degrees={"dp_shard": 2}, config=config)[0]
    assert_same(found, expected)


OTHERS: dict[str, dict[str, Any]] = {
    "tied": {"model": {"flavor": "tied"}},
    "bfloat16": {"training": BFLOAT16},
    "qwen": {"model": {"name": "tests.tiny_qwen3"}},
    "gemma": {"model": {"name": "tests.tiny_gemma3"}},
}


@pytest.mark.parametrize("other", slow_but(["tied", "bfloat16"], OTHERS))
def test_so_it_is_with_other_families_in_bfloat16_and_with_rows_that_ranks_do_not_divide(pools, other):
    sections = {"optimizer": MUON, **OTHERS[other]}
    expected, _ = expected_of(pools, **sections)
    for degrees in (TWO_BY_TWO, {"dp_shard": 4}):
        config = config_of(degrees, **sections)
        found, _ = pools[ranks_of(degrees)].run(f"{HERE}:orthogonalized", degrees=degrees, config=config)[0]
        assert_same(found, expected)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, but for what PyTorch's fused AdamW does: that depends on where in a vector register a value stands."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = 0.0 if is_orthogonalized(name.removesuffix(f".{muon.MOMENTUM}"), tensor, MUON_KEYS) else 1e-6
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance / 100)


def exchanged(shapes: list[tuple[int, int]], used: list[int]) -> bool:
    """Whether matrices sharded by rows, with fewer rows than ranks too, come back as what the owners made of them."""
    mesh = mesh_of({"dp_shard": dist.get_world_size()})["dp_shard"]
    wholes = [torch.arange(rows * columns).view(rows, columns) + 1000.0 * n for n, (rows, columns) in enumerate(shapes)]
    matrices = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in wholes]
    exchange = Redistribution(matrices)
    good, met = True, []
    for one in exchange.buckets(used):
        parts = exchange.map(one, [local_part(matrices[n]) for n in one.matrices], lambda matrix: matrix + matrix.sum())
        met += one.matrices
        for number, part in zip(one.matrices, parts, strict=True):
            expected = distribute_tensor(wholes[number] + wholes[number].sum(), mesh, [Shard(0)])
            good &= torch.equal(part, local_part(expected))
    return good and sorted(met) == used


@pytest.mark.parametrize("used", [[0, 1, 2, 3, 4, 5, 6], [1, 3, 5], [2]])
def test_matrices_of_any_shape_travel_to_their_owners_and_back(pools, used):
    shapes = [(7, 5), (3, 4), (1, 6), (2, 2), (9, 1), (7, 5), (8, 8)]
    assert all(pools[4].run(f"{HERE}:exchanged", shapes=shapes, used=used))


# ------------------------------------------------------------------------------------------------------------- whole runs


def test_the_estimate_counts_one_moment_of_a_matrix_and_two_of_all_else():
    config = config_of(ONE, optimizer=MUON)
    model = load_family("tests.tiny", "plain").on_meta()
    matrices = sum(p.numel() for name, p in model.named_parameters() if is_orthogonalized(name, p, config.optimizer))
    every = sum(p.numel() for p in model.parameters())
    assert 0 < matrices < every
    assert predict(config, 1).memory.moments == 8 * every - 4 * matrices
