"""What the distributed tests leave: nothing that runs on."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package", autouse=True)
def end_of_pools(pools: dict[int, Pool]) -> Iterator[None]:
    """Ends all ranks with these tests; another folder's test that asks for a pool gets new ones.

    Each of a rank's hundred process groups wakes up a hundred times a second, for nothing: half a core in all.
    """
    yield
    for pool in pools.values():
        pool.stop()
