"""The order of samples: a mixture of sources, each in its own permutation, with random access to any position.

Nothing is stored: sample i of a run is a function of the seed and i.
"""

import numpy as np

from titanlite.transforms.shards import key_of

MIXTURE = 2**20  # the unit in which shares of a mixture are counted
MAX_POSITION = 2**42
_ROUNDS = 6
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def sample_at(positions: np.ndarray, samples: int, seed: int | str) -> np.ndarray:
    """Which of `samples` samples are at the given positions of an endless run of epochs.

    positions (n,) int64, from 0; -> (n,) int64 below `samples`. Every epoch has its own permutation.
    seed: a number or a text that identifies the order.
    """
    assert samples > 0 and (positions >= 0).all()
    epochs, inside = np.divmod(positions, samples)
    chosen = np.empty_like(inside)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        chosen[here] = permute(inside[here], samples, f"{seed}/{epoch}")
    return chosen


def interleave(positions: np.ndarray, shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each position of an endless mixture, and how many samples of that source came before it.

    positions (n,) int64 below 2^42; shares: integers whose sum is at most MIXTURE. -> two (n,) int64.

    Of the first i samples, a source with share s of S has floor(i s / S), or up to one more for each source before it. So every
    batch has nearly the same mixture. Sources are assigned one after another: each takes its share of the samples that the
    sources before it have left.
    """
    assert ((positions >= 0) & (positions < MAX_POSITION)).all() and min(shares) > 0 and sum(shares) <= MIXTURE
    source = np.full(len(positions), len(shares) - 1)
    index = positions.copy()  # among the samples that the earlier sources have left
    open_ = np.arange(len(positions))
    total = sum(shares)
    for number, share in enumerate(shares[:-1]):
        here = index[open_]
        before = here * share // total  # below 2^62
        takes = (here + 1) * share // total > before
        source[open_[takes]] = number
        index[open_] = np.where(takes, before, here - before)
        open_ = open_[~takes]
        total -= share
    return source, index


def drawn(positions: int, shares: list[int]) -> list[int]:
    """How many of the first `positions` samples of `interleave` come from each source."""
    counts, total = [], sum(shares)
    for share in shares:
        counts.append(positions * share // total)
        positions, total = positions - counts[-1], total - share
    return counts


def permute(index: np.ndarray, count: int, key: str) -> np.ndarray:
    """The images of index (n,) int64 under a pseudorandom permutation of range(count).

    A Feistel network over the next even number of bits, applied again while the result is outside of the range ("cycle
    walking", Black & Rogaway, "Ciphers with arbitrary finite domains", 2002): at most four times on average.
    """
    assert ((index >= 0) & (index < count)).all()
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = np.array([key_of(f"{key}/{number}") for number in range(_ROUNDS)]).view(np.uint64)
    values = index.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= count
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer; uint64 arithmetic wraps."""
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))
