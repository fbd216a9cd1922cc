"""Initial weights that are off by a rounding, for `make campaign PART=processors`: no verdict may depend on the last bit.

The environment's TITANLITE_TESTS_DISTURB is the relative size. Each value gets its own share of it, by its parameter and
position, so that all meshes still start with the same weights. Ranks of pools are disturbed, and so is the process of pytest.
"""

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from models.blocks import Distribution
from titanlite.transforms import initialize

VARIABLE = "TITANLITE_TESTS_DISTURB"


def install() -> None:
    """Call once in a process, or in the one from which it is forked."""
    if not (size := float(os.environ.get(VARIABLE, 0))):
        return
    values_at = initialize._values_at

    def disturbed(distribution: Distribution, key: int, *where: Any) -> Callable[[Tensor], Tensor]:
        values = values_at(distribution, key, *where)

        def value(index: Tensor) -> Tensor:
            share = 2 * initialize._fraction(initialize.splitmix64(index, key ^ 1)).double() - 1  # of [-1, 1)
            return values(index) * (1 + size * share)

        return value

    initialize._values_at = disturbed
