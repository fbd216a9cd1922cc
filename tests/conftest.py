"""What all tests share: the pools of ranks."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> dict[int, Pool]:
    """Pools of 1, 2, 4 and 8 ranks; each starts at its first use."""
    return {size: Pool(size) for size in (1, 2, 4, 8)}


@pytest.fixture(scope="module", autouse=True)
def end_of_pools(pools: dict[int, Pool]) -> Iterator[None]:
    """Ends all ranks with the tests of a file; the next one that asks for a pool gets new ones.

    Each of the process groups that gather in a rank wakes up a hundred times a second, for nothing: with those of all files
    that is half of what a machine of two cores can do.
    """
    yield
    for pool in pools.values():
        pool.stop()
