"""Rounding to bfloat16: correct in the mean, with random bits that depend on name, step and position; and exact remainders."""

import math

import pytest
import torch

from titanlite.optim.rounding import _wrapped, joined, keys_of, positions, random_bits, root, split, stochastic


def _bits(rows: int, columns: int, name: int = 1, step: int = 1, word: int = 0) -> torch.Tensor:
    key = keys_of(torch.tensor([name]), torch.tensor([step]))[0]
    return random_bits(positions(torch.empty(rows, columns)), key, word)


def _neighbors(value: float) -> tuple[float, float]:
    """The bfloat16 numbers below and above, from the definition: 8 significant bits."""
    unit = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    return math.floor(value / unit) * unit, math.ceil(value / unit) * unit


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, 1e-3, -7.7e-12, 6.02e23])
def test_the_mean_of_stochastic_rounding_is_the_value(value):
    low, high = _neighbors(value)
    rounded = torch.stack([stochastic(torch.full((100, 100), value), _bits(100, 100, step=step)) for step in range(10)])
    assert rounded.dtype == torch.bfloat16
    assert {*rounded.double().unique().tolist()} == {low, high}
    expected = (torch.tensor(value).double().item() - low) / (high - low)
    share = (rounded.double() == high).double().mean().item()
    assert share == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / rounded.numel()) + 2**-16)


def test_bfloat16_values_do_not_change_for_any_random_bits():
    exact = torch.tensor([[0.0, -0.0, 1.0, -1.5, 2.0**-130, math.inf, -math.inf, 3.3895e38]]).bfloat16()
    for step in range(100):
        assert torch.equal(stochastic(exact.float(), _bits(1, 8, step=step)).view(torch.int16), exact.view(torch.int16))
    assert stochastic(torch.tensor([[math.nan]]), _bits(1, 1)).isnan().all()


def test_a_remainder_and_its_bfloat16_are_the_float32_bit_for_bit():
    torch.manual_seed(0)
    every = torch.randn(100, 1000) * 2.0 ** torch.randint(-100, 100, (100, 1000))
    every[0, :6] = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-42, 1.00390625])
    high, low = split(every)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(joined(high, low).view(torch.int32), every.view(torch.int32))
    nearest = every.bfloat16()  # which rounds halves to even
    finite = high.isfinite()
    assert torch.equal((high.double() - every).abs()[finite], (nearest.double() - every).abs()[finite])


def test_bits_are_those_of_the_published_mixing_function():
    def mixed(index: int, first: int, second: int) -> int:
        x = index ^ first
        x = ((x ^ (x >> 16)) * 0x7FEB352D + second) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    key = keys_of(torch.tensor([-5]), torch.tensor([7]))[0]
    words = [int(word) % 2**32 for word in key]
    found = random_bits(positions(torch.empty(50, 60)), key, 1).flatten().tolist()
    assert [bits % 2**32 for bits in found] == [mixed(index, *words[2:]) for index in range(3000)]


@pytest.mark.parametrize("shape", [(3, 4096), (2, 3, 1536), (5, 48), (2048,), (7, 10), (11,)])
def test_the_positions_of_a_whole_parameter_count_its_values_in_order(shape):
    found = positions(torch.empty(shape))
    assert (found.rows + found.columns).flatten().tolist() == list(range(math.prod(shape)))


def test_positions_count_modulo_two_to_the_32():
    index = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 5])
    assert [int(i) % 2**32 for i in _wrapped(index)] == [0, 1, 2**31, 2**32 - 1, 0, 5]


def test_the_square_root_is_rounded_by_ieee_754():
    values = torch.rand(10_000)
    expected = torch.tensor([math.sqrt(value) for value in values.tolist()], dtype=torch.float64).float()
    assert torch.equal(root(values), expected)
