"""The order of samples: every epoch has its own permutation, any position is computed directly."""

import time

import numpy as np
import pytest

from titanlite.data.order import MAX_POSITION, MIXTURE, drawn, interleave, permute, sample_at


def _order(count: int, key: str = "0/0") -> np.ndarray:
    return permute(np.arange(count), count, key)


@pytest.mark.parametrize("counts", [range(1, 301), (1023, 1024, 1025, 4095, 4096, 4097, 16385)])
def test_every_count_gives_a_bijection(counts):
    for count in counts:
        assert np.array_equal(np.sort(_order(count)), np.arange(count)), count


def test_order_is_pinned():
    assert _order(10).tolist() == [3, 2, 9, 1, 7, 0, 5, 8, 4, 6]


def test_order_differs_by_epoch_and_seed_and_not_between_calls():
    first = sample_at(np.arange(1000), 1000, seed=0)
    assert np.array_equal(first, sample_at(np.arange(1000), 1000, seed=0))
    for other in (sample_at(np.arange(1000, 2000), 1000, seed=0), sample_at(np.arange(1000), 1000, seed=1)):
        assert (first == other).mean() < 0.01  # two random permutations agree in one position on average


def test_seed_and_epoch_are_not_confused():
    orders = {sample_at(np.arange(50) + 50 * epoch, 50, seed).tobytes() for seed in range(12) for epoch in range(12)}
    assert len(orders) == 144


def test_every_epoch_holds_every_sample_once():
    samples = 97
    order = sample_at(np.arange(5 * samples), samples, seed=3).reshape(5, samples)
    assert (np.sort(order, axis=1) == np.arange(samples)).all()
    assert len({row.tobytes() for row in order}) == 5


@pytest.mark.parametrize("samples", [7, 1_000_003, 2**41 + 5])
def test_far_positions_are_computed_directly(samples):
    begin = time.process_time()
    together = sample_at(np.arange(2**40, 2**40 + 64), samples, seed=0)
    seconds = time.process_time() - begin
    one_by_one = [sample_at(np.array([position]), samples, seed=0)[0] for position in range(2**40, 2**40 + 64)]
    assert together.tolist() == one_by_one
    assert ((together >= 0) & (together < samples)).all()
    assert seconds < 1.0


@pytest.mark.parametrize("count", [3, 4, 5])
def test_small_counts_reach_every_permutation(count):
    """Few samples leave a Feistel network few bits: all orders must occur, none far too often."""
    draws = 2400
    orders, seen = np.unique([_order(count, f"0/{epoch}") for epoch in range(draws)], axis=0, return_counts=True)
    every = [1, 1, 2, 6, 24, 120][count]
    expected = draws / every
    assert len(orders) == every
    assert seen.max() < expected + 6 * expected**0.5


# ------------------------------------------------------------------------------------------------------------- mixtures

_MIXTURES = [[1], [1, 1], [3, 1], [1, 3, 1], [1000, 1, 7], [MIXTURE - 2, 1, 1], [5, 5, 5, 5, 5, 5, 5]]


@pytest.mark.parametrize("shares", _MIXTURES, ids=str)
def test_a_mixture_deals_every_sample_once_in_order_and_keeps_shares_within_one_sample_per_source(shares):
    source, index = interleave(np.arange(5000), shares)
    for number in range(len(shares)):
        assert index[source == number].tolist() == list(range((source == number).sum()))
    for end in (1, 7, 100, 3001, 5000):
        counts = np.bincount(source[:end], minlength=len(shares))
        assert drawn(end, shares) == counts.tolist()
        expected = np.array(shares) * end / sum(shares)
        assert (abs(counts - expected) <= len(shares)).all()


def test_far_positions_of_a_mixture_follow_from_what_was_drawn_before():
    random = np.random.default_rng(0)
    for shares in _MIXTURES:
        for position in [*random.integers(0, 2**40, 50).tolist(), 2**40, MAX_POSITION - 2]:
            source, index = (int(values[0]) for values in interleave(np.array([position]), shares))
            before, after = drawn(position, shares), drawn(position + 1, shares)
            assert index == before[source]
            assert [b - a for a, b in zip(before, after, strict=True)] == [number == source for number in range(len(shares))]
