"""Comparisons of a run on a mesh with the same run on one process."""

from collections.abc import Callable

from tests.distributed.pool import Pool
from titanlite.config.schema import Config
from titanlite.parallel.mesh import ranks_of
from titanlite.verify.compare import Trajectory, compare

LEARNABLE = "tests.distributed.scenarios:trajectory"


def trajectory_of(pools: dict[int, Pool], degrees: dict[str, int], config: Config, function: str = LEARNABLE) -> Trajectory:
    return pools[ranks_of(degrees)].run(function, degrees=degrees, config=config)[0][0]


def as_one_process(
    pools: dict[int, Pool], degrees: dict[str, int], configured: Callable[[dict[str, int]], Config], function: str = LEARNABLE
) -> tuple[Trajectory, Trajectory]:
    """What happened on the mesh and on one process, which differ by no more than rounding. configured: from degrees."""
    found, alone = (trajectory_of(pools, mesh, configured(mesh), function) for mesh in (degrees, {}))
    comparison = compare(found, alone)
    assert [str(each) for each in comparison.excessive] == []
    assert comparison.of("gradients")
    return found, alone
