"""Mixtures with split experts, whatever else is done: the product of routers, meshes and variants, each against one process.

In float32 a cell has the gradients of one process within 1e-5, and its counts and biases exactly. The smallest margin of the
reference's choices is far above rounding. In bfloat16 rounding can change a choice, so split experts are compared with whole
ones on the same mesh.
"""

import functools
import itertools
from typing import Any

import torch

from tests.campaigns import Report
from tests.distributed.mixtures import BFLOAT16, MARGIN, MESHES, VARIANTS, Recorded, config_of_cell
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import GRAPHS
from titanlite.parallel.mesh import ranks_of
from titanlite.verify.compare import compare

FLAVORS = {"plain": "softmax", "shared": "sigmoid, bias and shared", "grouped": "grouped", "gpt_oss": "gpt-oss"}
_HALF: dict[str, Any] = {"training": {"mixed_precision_param": "bfloat16"}}
HERE = "tests.distributed.mixtures"


def items(pools: dict[int, Pool]) -> dict[str, Any]:
    """name -> what plays the cell."""
    cells = itertools.product(FLAVORS, MESHES, [*VARIANTS, "bfloat16"])
    return {
        f"mixture, {FLAVORS[flavor]}, {mesh}, {variant}": functools.partial(_play, pools, flavor, mesh, variant)
        for flavor, mesh, variant in cells
    }


def _play(pools: dict[int, Pool], flavor: str, mesh: str, variant: str, _: Any) -> Report:
    degrees = MESHES[mesh]
    try:
        if variant == "bfloat16":
            whole = {name: degree for name, degree in degrees.items() if name != "ep"}
            found, expected = (_run(pools, flavor, each, "plain", **_HALF) for each in (degrees, whole))
            tolerances, steps = BFLOAT16, 1  # a choice of a later step may be another one
        else:
            found, expected = _run(pools, flavor, degrees, variant), _alone(pools[1], flavor)
            tolerances, steps = {}, len(expected.counts)
            if _margin(pools[1], flavor) <= MARGIN:
                return Report({}, ["the choices of the reference depend on rounding"])
    except WorkerFailure as failure:
        return Report({}, [str(failure).splitlines()[-1]])
    comparison = compare(found.trajectory, expected.trajectory)
    broken = [str(each) for each in comparison.differences if not each.size <= tolerances.get(each.quantity, each.tolerance)]
    graphs = GRAPHS + (flavor == "gpt_oss")  # whose local layers have a mask, and global ones none
    if found.graphs != (graphs if "compiled" in variant else 0):
        broken.append(f"{found.graphs} graphs")
    if not all(map(torch.equal, found.counts[:steps], expected.counts[:steps])):
        broken.append("the counts of experts differ")
    if len(found.biases) != len(expected.biases) or not all(map(torch.equal, found.biases[:steps], expected.biases[:steps])):
        broken.append("the biases of routers differ")
    figures = {quantity: f"{comparison.worst(quantity).size:.1e}" for quantity in ("losses", "norms", "gradients")}
    return Report(figures, broken)


def _run(pools: dict[int, Pool], flavor: str, degrees: dict[str, int], variant: str, **more: dict[str, Any]) -> Recorded:
    config = config_of_cell(flavor, degrees, variant, **_moved(flavor), **more)
    result: Recorded = pools[ranks_of(degrees)].run(f"{HERE}:recorded", timeout=300, degrees=degrees, config=config)[0]
    return result


@functools.cache
def _alone(pool: Pool, flavor: str) -> Recorded:
    return _run({1: pool}, flavor, {}, "plain")


@functools.cache
def _margin(pool: Pool, flavor: str) -> float:
    config = config_of_cell(flavor, {}, "plain", **_moved(flavor))
    margin: float = pool.run(f"{HERE}:with_margin", degrees={}, config=config)[0][1]
    return margin


def _moved(flavor: str) -> dict[str, Any]:
    """[moe], with which the bias moves, if the router has one."""
    return {"moe": {"bias_update_speed": 0.01}} if flavor == "shared" else {}
