"""The order of samples: a permutation that any position can be asked of, without a list of it in memory."""

import hashlib

import numpy as np

_ROUNDS = 6
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def sample_at(positions: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Which of `samples` samples stand at the given positions of an endless run of epochs.

    positions (n,) int64, from 0; -> (n,) int64 below `samples`. Every epoch is a permutation of its own.
    """
    assert samples > 0 and (positions >= 0).all()
    epochs, inside = np.divmod(positions, samples)
    chosen = np.empty_like(inside)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        chosen[here] = permute(inside[here], samples, f"{seed}/{epoch}")
    return chosen


def permute(index: np.ndarray, count: int, key: str) -> np.ndarray:
    """The images of index (n,) int64 under a pseudorandom permutation of range(count).

    A Feistel network over the next even number of bits, applied again while the result is outside of the range ("cycle
    walking", Black & Rogaway, "Ciphers with arbitrary finite domains", 2002): four times at most on average.
    """
    assert ((index >= 0) & (index < count)).all()
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [_round_key(key, number) for number in range(_ROUNDS)]
    values = index.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= count
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser; uint64 arithmetic wraps."""
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def _round_key(key: str, number: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest(), "little"))
