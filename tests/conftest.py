"""What all tests share: the pools of ranks."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools of 1, 2, 4 and 8 ranks; each starts at its first use."""
    every = {size: Pool(size) for size in (1, 2, 4, 8)}
    yield every
    for pool in every.values():
        pool.stop()
