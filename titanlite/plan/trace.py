"""Recorded routing: what the all-to-all of each MoE layer moved in a run, on as many ranks as a prediction has."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from models.decoder import Decoder
from models.further import further_of
from models.moe import Router, routers_of
from titanlite.ground.errors import UserError, listed
from titanlite.ground.run_files import ROUTING
from titanlite.ground.untrusted import MIB, Count, FileSchema, Positive, read_json

_LIMIT = 64 * MIB  # 58 MoE layers of 256 experts take 0.1 MiB


class RecordedLayer(FileSchema):
    """One MoE layer of the model, from the first block on."""

    top_k: Positive
    counts: Annotated[list[Count], Field(min_length=1, max_length=2**16)]  # rows of each expert


class Trace(FileSchema):
    """The routing.json of a run (optim/balance.py: routing)."""

    step: Count
    mixtures: Annotated[list[RecordedLayer], Field(min_length=1, max_length=2**16)]


def read_trace(path: Path) -> Trace:
    """path: the file, or the folder of a run. Raises UserError."""
    file = path / ROUTING if path.is_dir() else path
    trace = Trace.model_validate(read_json(file, Trace, _LIMIT))
    if empty := [number for number, each in enumerate(trace.mixtures) if not sum(each.counts)]:
        raise UserError(f"{file}: mixtures.{empty[0]}.counts: are all 0, must be those of a step")
    return trace


def check_trace(trace: Trace, path: Path, model: nn.Module) -> None:
    """Raises UserError that lists how the MoE layers of the trace differ from those of the model."""
    routers = routers_of(model)
    faults = [f"has {len(trace.mixtures)} MoE layers, the model {len(routers)}"] if len(routers) != len(trace.mixtures) else []
    for number, (there, router) in enumerate(zip(trace.mixtures, routers, strict=False)):
        here, recorded = _shape(router), (len(there.counts), there.top_k)
        if here != recorded:
            what = "MoE layer {}: {} experts and top_k = {}, in the model {} and {}"
            faults.append(what.format(number, *recorded, *here))
    if faults:
        raise UserError(listed(f"{path}: is the routing of another model:", faults))


def _shape(router: Router) -> tuple[int, int]:
    return len(router.weight), router.top_k


def routings(model: Decoder, routing: Literal["balanced", "worst"] | Trace) -> dict[str, Any]:
    """The routing of each MoE layer: one for all, or the recorded rows of its experts."""
    named = [name for name, layer in [*model.layers.items(), *further_of(model).items()] if routers_of(layer)]
    if isinstance(routing, Trace):
        return {name: layer.counts for name, layer in zip(named, routing.mixtures, strict=True)}
    return dict.fromkeys(named, routing)


def busiest(counts: list[int], ranks: int) -> float:
    """Rows that the busiest rank receives, relative to the mean. Each of `ranks` ranks has an equal run of the experts."""
    experts = len(counts) // ranks
    return max(sum(counts[first:][:experts]) for first in range(0, len(counts), experts)) * ranks / sum(counts)
