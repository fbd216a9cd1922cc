"""Initial weights: the right distribution, a function of only seed, name and position, and no value left unset."""

import math
import types
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from models import llama3
from models.blocks import Computed, Constant, Identity, Normal, Uniform
from tests import tiny
from titanlite.registry.family import Family
from titanlite.transforms.initialize import (
    _CHUNK,
    fill,
    initialize,
    match_initial,
    materialize,
    named_tensors,
)
from titanlite.transforms.shards import splitmix64

_CPU = torch.device("cpu")
_NORMAL = NormalDist()
_CONFIG = llama3.Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=96)


def _with(distribution, *shape: int, name: str = "layers.0.mixer.weight", seed: int = 0) -> torch.Tensor:
    tensor = torch.full(shape, math.nan)
    fill(tensor, name, distribution, seed)
    return tensor


# -------------------------------------------------------------------------------------------------------- distribution


def _truncated_normal(cutoff: float) -> Callable[[float], float]:
    """Its distribution function."""
    low, mass = _NORMAL.cdf(-cutoff), _NORMAL.cdf(cutoff) - _NORMAL.cdf(-cutoff)
    return lambda value: (0.5 * math.erfc(-value / math.sqrt(2)) - low) / mass


@pytest.mark.parametrize(
    ("distribution", "below"),
    [
        (Normal(1.0, 1.0), _truncated_normal(1.0)),
        (Normal(1.0, 3.0), _truncated_normal(3.0)),
        (Uniform(-0.25, 0.75), lambda value: value + 0.25),
        (Uniform(0.1, 0.3), lambda value: (value - 0.1) / 0.2),
    ],
    ids=["normal, cut off at 1", "normal, cut off at 3", "uniform around 0.25", "uniform around 0.2"],
)
def test_kolmogorov_smirnov_distance_to_the_distribution_function(distribution, below):
    values = np.sort(_with(distribution, 512, 512).double().numpy().ravel())
    count, wanted = len(values), np.array([below(value) for value in values])
    assert wanted[0] > -1e-6 and wanted[-1] < 1 + 1e-6, "none is out of bounds"
    steps = np.arange(count + 1) / count
    distance = max(np.abs(wanted - steps[1:]).max(), np.abs(wanted - steps[:-1]).max())
    assert distance < 1.95 / count**0.5  # exceeded by one valid sample in a thousand


def test_identity_is_a_diagonal_of_the_last_two_dimensions():
    assert torch.equal(_with(Identity(), 5, 5), torch.eye(5))
    assert torch.equal(_with(Identity(0.5), 3, 7), 0.5 * torch.eye(3, 7))
    assert torch.equal(_with(Identity(2.0), 4, 6, 3), 2 * torch.eye(6, 3).expand(4, 6, 3))


def _decays(index, shape):
    return ((index[0] + 1).double() / shape[0]).log() + index[-1].double().sqrt()


def test_computed_values_equal_the_function_in_float64():
    row, column = torch.arange(40).double()[:, None], torch.arange(30).double()
    assert torch.equal(_with(Computed(_decays), 40, 30), (((row + 1) / 40).log() + column.sqrt()).float())
    assert torch.equal(_with(Computed(lambda index, shape: index[0]), 6), torch.arange(6.0))
    assert torch.equal(_with(Computed(lambda index, shape: shape[0] / 4), 3), torch.full((3,), 0.75))


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunks_of_any_size_have_the_values_of_the_whole(monkeypatch, chunk):
    shape, kinds = (13, 6, 9), (Normal(1.0), Computed(_decays))
    whole = [_with(kind, *shape) for kind in kinds]
    monkeypatch.setitem(_CHUNK, "cpu", chunk)
    assert all(map(torch.equal, whole, (_with(kind, *shape) for kind in kinds)))


# ----------------------------------------------------------------------------------------------- a function of its inputs


def _splitmix64(index: int, key: int) -> int:
    """The reference generator's output number `index` from state `key`, in unbounded integers."""
    mask = 2**64 - 1
    z = (key + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF])
def test_hash_is_splitmix64(key):
    positions = [0, 1, 2, 3, 1000, 2**31, 2**32 + 1, 2**40 + 7, 2**62 + 1]
    found = splitmix64(torch.tensor(positions), key)
    assert [value % 2**64 for value in found.tolist()] == [_splitmix64(position, key) for position in positions]


def test_values_are_pinned():
    """A change of these values changes the initial weights of every run."""
    values = _with(Normal(0.02), 4, name="layers.0.attention.wq.weight")
    assert [value.hex() for value in values.tolist()] == [
        "-0x1.85868c0000000p-6",
        "-0x1.5abd6e0000000p-6",
        "0x1.8c404c0000000p-5",
        "0x1.ed03ba0000000p-7",
    ]


# ------------------------------------------------------------------------------------------------------ a whole model


class _Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


_TOY_TABLE = {"linear.weight": Normal(0.5), "linear.bias": Constant(0.0), "count": Constant(3), "s*": Constant(0.25)}


def _toy(table: dict) -> tuple[nn.Module, Family]:
    with torch.device("meta"):
        return _Toy(), Family(types.SimpleNamespace(initial=lambda config: table), None)


def _llama(**changes) -> tuple[nn.Module, Family]:
    family = Family(llama3, llama3.Config(**{**vars(_CONFIG), **changes}))
    return family.on_meta(), family


def test_table_covers_integer_and_other_buffers():
    model, family = _toy(_TOY_TABLE)
    initialize(model, family, 0, _CPU)
    assert model.count == 3
    assert model.count.dtype == torch.int64
    assert model.scale.tolist() == model.scratch.tolist() == [0.25, 0.25]
    assert model.linear.bias.tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(model.linear.weight, _with(Normal(0.5), 3, 4, name="linear.weight"))


def test_materialized_tensors_are_nan_and_initialized_ones_have_none():
    model, family = _llama()
    materialize(model, _CPU)
    assert all(tensor.isnan().all() for _, tensor in named_tensors(model))
    initialize(model, family, 0, _CPU)
    assert not any(tensor.isnan().any() for _, tensor in named_tensors(model))


def test_a_tensor_that_stays_nan_is_found():
    model, family = _toy({**_TOY_TABLE, "linear.bias": Constant(math.nan)})
    with pytest.raises(AssertionError, match=r"linear\.bias"):
        initialize(model, family, 0, _CPU)


def test_tied_parameters_stay_one_and_are_initialized_under_the_first_name():
    model, family = _llama(tied_embeddings=True)
    initialize(model, family, 0, _CPU)
    assert model.head.output.weight is model.embed.weight
    assert torch.equal(model.embed.weight, _with(Normal(0.02), 96, 32, name="embed.weight"))


def _faults_of(distribution, tensor: torch.Tensor) -> list[str]:
    """The faults of a tiny Llama whose first block has another parameter, or a buffer if it has integers."""

    class Module:
        sharding, flops = tiny.sharding, tiny.flops
        initial = staticmethod(lambda config: {"*.gain": distribution, "*": Normal(0.02)})

        class Model(tiny.Model):
            def __init__(self, config):
                super().__init__(config)
                if tensor.is_floating_point():
                    self.layers["0"].gain = nn.Parameter(tensor)
                else:
                    self.layers["0"].register_buffer("gain", tensor)

    family = Family(Module, tiny.FLAVORS["plain"])
    return match_initial(family.on_meta(), family)[1]


@pytest.mark.parametrize(
    ("distribution", "tensor", "fault"),
    [
        (Normal(0.02), torch.arange(4), "is a buffer, and must be a Constant"),
        (Normal(0.02), torch.ones(()), "has no dimension"),
        (Identity(), torch.ones(12), "is Identity, which is for matrices, and has 1 dimension"),
        (
            Computed(lambda index, shape: index[0] / index[0].max()),
            torch.ones(12),
            "differently for several positions than for",
        ),
        (Computed(lambda index, shape: index[0].double().log()), torch.ones(12), "which is not finite"),
        (0.02, torch.ones(12), "has 0.02; models/blocks.py offers Normal, Uniform, Constant, Identity, Computed"),
    ],
)
def test_a_distribution_that_depends_on_the_shard_or_does_not_fit_is_refused(distribution, tensor, fault):
    (found,) = _faults_of(distribution, tensor)
    assert found.startswith("initial: layers.*.gain ") and fault in found
