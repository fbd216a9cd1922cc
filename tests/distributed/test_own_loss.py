"""A loss other than cross entropy gives the losses, norms and gradients of one process if the mesh splits its tokens."""

from typing import Any

import pytest

from tests.distributed.as_one import as_one_process, trajectory_of
from tests.distributed.scenarios import MODES, config_of
from tests.repetitions import slow_but
from titanlite.config.schema import Config
from titanlite.verify.compare import compare, replaced

CELLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 2, a vocabulary that it does not divide": ({"tp": 2}, {"model": {"flavor": "uneven"}}),
    "pp 2": ({"pp": 2}, {"parallelism": {"pipeline_parallel_schedule": "GPipe"}}),
    "cp 2, recomputed": ({"cp": 2}, {"activation_checkpoint": MODES["full"]}),
    "pp 2 x tp 2, tied": ({"pp": 2, "tp": 2}, {"model": {"flavor": "tied"}}),
}


def config_of_cell(degrees: dict[str, int], sections: dict[str, Any]) -> Config:
    model = {"name": "tests.tiny_smoothed", "flavor": "plain"} | sections.get("model", {})
    microbatches = 4 // degrees.get("dp_shard", 1) if "pp" in degrees else 1
    others = {name: keys for name, keys in sections.items() if name != "model"}
    return config_of(degrees, model.pop("flavor"), microbatches, model=model, training={"steps": 3, "z_loss": 1e-3}, **others)


@pytest.mark.parametrize("cell", slow_but([*CELLS][:3], CELLS))
def test_another_loss_trains_as_on_one_process(pools, cell):
    degrees, sections = CELLS[cell]
    model = {"model": sections.get("model", {})}
    as_one_process(pools, degrees, lambda mesh: config_of_cell(mesh, sections if mesh else model))


def test_a_run_trains_with_the_loss_that_the_key_names(pools):
    keys = {"loss": "tests.own.parts:smoothed", "loss_options": {"share": 0.1}}
    named = config_of({}, "plain", training={"steps": 3, "z_loss": 1e-3, **keys})
    other = replaced(named, training={"loss_options": {"share": 0.3}})
    expected, found, differs = (trajectory_of(pools, {}, each) for each in (config_of_cell({}, {}), named, other))
    assert [str(each) for each in compare(found, expected).excessive] == []
    assert compare(differs, found).excessive
