"""Initial weights of every distribution on meshes: bit for bit those of one process."""

import math

import pytest
import torch
from torch import Tensor

from models.blocks import Computed, Identity, Normal, Uniform
from tests import tiny
from tests.distributed.scenarios import CPU, config_of, mesh_of
from titanlite.loop.step import build_model
from titanlite.registry.family import Family
from titanlite.verify.compare import whole

HERE = "tests.distributed.test_initialize"


def _wave(index: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    return (sum(place * (axis + 1) for axis, place in enumerate(index)).double() / shape[0]).sin().exp()


def initial(config: tiny.Config) -> dict[str, object]:
    return {
        "embed.weight": Uniform(-0.3, 0.5),
        "layers.*.attention.w[qo].weight": Identity(0.7),
        "layers.*.attention.w[kv].weight": Computed(_wave),
        "layers.*.ffn.w1.weight": Uniform(0.1, 0.3),
        "layers.*.ffn.w[23].weight": Computed(_wave),
        "head.output.weight": Normal(0.02),
        "*norm.weight": Computed(_wave),
    }


def weights(degrees: dict[str, int], flavor: str) -> dict[str, Tensor]:
    class Module:
        Model, sharding, flops = tiny.Model, tiny.sharding, tiny.flops

    Module.initial = staticmethod(initial)
    model = build_model(Family(Module, tiny.FLAVORS[flavor]), config_of(degrees, flavor), mesh_of(degrees), CPU)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("degrees", "flavor"),
    [
        ({"tp": 2}, "uneven"),
        ({"dp_shard": 2}, "plain"),
        ({"dp_shard": 2, "tp": 2}, "uneven"),
        *(pytest.param({key: 4}, "uneven", marks=pytest.mark.slow) for key in ("tp", "dp_shard")),
    ],
    ids=str,
)
def test_every_distribution_gives_a_mesh_the_weights_of_one_process_bit_for_bit(pools, degrees, flavor):
    expected = pools[1].run(f"{HERE}:weights", degrees={}, flavor=flavor)[0]
    assert all(weight.std() > 0.01 for weight in expected.values())
    for found in pools[math.prod(degrees.values())].run(f"{HERE}:weights", degrees=degrees, flavor=flavor):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
