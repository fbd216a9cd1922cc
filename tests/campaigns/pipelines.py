"""Pipelines: the product of schedules, meshes and variants, each against one process.

A cell has the weights, batches, losses, norms and gradients of one process within the tolerances of `titanlite verify`: 1e-5 of
a gradient's norm, and no gradient is missing.
"""

import itertools
from collections.abc import Iterator

from tests.distributed.cover import PLAIN, SEVERAL_STAGES, Cell, allowed

_SCHEDULES = ("1F1B", "Interleaved1F1B")
_MIXTURE: Cell = {"family": "Mixture", "router": "sigmoid, bias, shared", "balance": "moving bias"}
_MESHES: tuple[Cell, ...] = (
    *({"mesh": f"pipeline {degrees}"} for degrees in ("2", "4", "2 x shard 2", "2 x tp 2", "2 x replicate 2", "2 x context 2")),
    {"mesh": "pipeline 2 x shard 2", "experts": "split 2", **_MIXTURE},
)
_VARIANTS: tuple[Cell, ...] = (
    {},
    {"family": "Llama 3 tied"},
    {"documents": "many"},
    {"recompute": "full"},
    {"recompute": "per operation"},
    {"compile": "blocks"},
)


def every_cell() -> Iterator[Cell]:
    """All supported cells, with four microbatches."""
    for mesh, schedule, variant in itertools.product(_MESHES, _SCHEDULES, _VARIANTS):
        if mesh.keys().isdisjoint(variant):  # an MoE model has untied weights
            blocks = "8" if mesh["mesh"] == "pipeline 4" and schedule in SEVERAL_STAGES else "4"
            cell = PLAIN | {"schedule": schedule, "blocks": blocks, "accumulation": "4"} | mesh | variant
            if allowed(cell):
                yield cell
