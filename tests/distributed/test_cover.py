"""P1: the mesh does not change the mathematics in any combination: every cell of a table against one process.

`python -m tests.distributed.cover` prints the table; `pytest -k "tp and Qwen"` runs the cells with both in their names.
"""

import shutil
from collections.abc import Callable

import pytest
import torch

from tests.distributed import cells, cover
from tests.distributed.cover import LATER, OTHER_FLOAT8, OTHER_PIPELINES, PLAIN, Cell
from tests.distributed.mixtures import MARGIN, skip_without_2_13
from tests.repetitions import campaign_but
from titanlite.parallel.mesh import ranks_of
from titanlite.verify.compare import Trajectory, compare

CELLS = {cover.name(cell): cell for cell in cover.cover(without=LATER)}
# Every value with every mesh dimension, in `make test` without compiled experts, which take ten times as long as other cells.
# `make test-all` has those too, and every pair of values without the compiler.
FEW = cover.few(CELLS, cover.with_dimensions)
PLAINLY = {name for name, cell in CELLS.items() if cell["compile"] == "no"}
FEW_NOW = [name for name in FEW if name in PLAINLY or CELLS[name]["family"] != "Mixture"]


def kernels(cell: Cell) -> set[tuple[str, ...]]:
    """What changes the kernels of inductor, which compiles instead of "aot_eager", the most."""
    factors = {"precision": cell["precision"], "experts": str(cell["family"] == "Mixture")}
    return {*factors.items(), *((dimension, str(dimension in cell["mesh"])) for dimension in ("tp", "shard"))}


def more_kernels(cell: Cell) -> set[tuple[str, ...]]:
    return kernels(cell) | {(factor, cell[factor]) for factor in ("family", "recompute", "documents")}


_OF_COMPILER = {name: cell for name, cell in CELLS.items() if name not in PLAINLY}
FEW_COMPILED = cover.few(_OF_COMPILER, kernels)  # in `make test-all`
COMPILED = cover.few(_OF_COMPILER, more_kernels)  # in a campaign
# Several dimensions at once need eight ranks, which take as long as ten other cells: the families least like Llama, and special
# cases of gathering. Two meshes of four ranks are in no table.
_STAGES = {"blocks": "4", "accumulation": "2"}
AT_ONCE = [
    {"mesh": "shard 2 x context 2 x tp 2", "family": "Gemma 3", "documents": "many", "recompute": "per operation"},
    {
        "mesh": "replicate 2 x shard 2 x tp 2",
        "family": "Llama 3 tied",
        "accumulation": "2, reduced at the end",
        "optimizer": "Muon",
    },
    {"mesh": "replicate 2 x shard 2 x tp 2", "family": "Llama 3 of 515 tokens", "recompute": "full", "gather": "never"},
    {"mesh": "context 4", "family": "Qwen 3", "documents": "many", "method": "heads exchanged", "recompute": "full"},
    {"mesh": "replicate 2 x context 2", "family": "OLMo 2", "accumulation": "2, reduced at the end"},
    _STAGES | {"mesh": "pipeline 2 x replicate 2 x tp 2", "family": "Llama 3 tied", "recompute": "per operation"},
    # 16 ranks: every dimension but replicas
    _STAGES
    | {"mesh": "pipeline 2 x shard 2 x context 2 x tp 2", "experts": "split 4", "schedule": "Interleaved1F1B"}
    | {"family": "Mixture", "router": "sigmoid, bias, shared", "balance": "moving bias"},
]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason='backend "inductor" needs a C++ compiler on a CPU')


@pytest.fixture(scope="module")
def references(pools) -> Callable[[Cell], Trajectory]:
    """The trajectory of one plain process, run once for all cells with the same mathematics."""
    known: dict[tuple[str, ...], Trajectory] = {}

    def reference(cell: Cell) -> Trajectory:
        plain = cells.reference_of(cell)
        key = tuple(plain.values())
        if key not in known:
            arguments = {"cell": plain, "config": cells.config_of_cell(plain)}
            found, margin = pools[1].run("tests.distributed.cells:with_margin", **arguments)[0]
            assert margin > MARGIN, f"a choice of experts depends on rounding: {cover.name(plain)}"
            known[key] = found
        return known[key]

    return reference


def assert_as_on_one_process(pools, references, cell: Cell, backend: str = "aot_eager") -> None:
    config = cells.config_of_cell(cell)
    skip_without_2_13(config)
    found, graphs = cells.run(pools, cell, backend)
    assert cells.faults(cell, found, references(cell)) == []
    assert graphs in cells.graphs_of(cell)


def test_every_valid_pair_of_values_is_in_a_cell():
    assert set().union(*map(cover.pairs, CELLS.values())) == cover.every_pair(LATER)
    assert all(map(cover.allowed, CELLS.values()))
    values = {(factor, value) for factor, values in cover.FACTORS.items() for value in values}
    assert {part for cell in CELLS.values() for part in cell.items()} == {part for part in values if part[1] not in LATER}


@pytest.mark.parametrize("name", campaign_but(FEW_NOW, PLAINLY | {*FEW}, CELLS))
def test_a_cell_gives_the_weights_batches_losses_norms_and_gradients_of_one_process(pools, references, name):
    assert_as_on_one_process(pools, references, CELLS[name])


@pytest.mark.parametrize("family", cells.FAMILIES)
def test_the_references_learn_from_nonzero_gradients(references, family):
    found = references(PLAIN | {"family": family})
    assert found.losses[-1] < 0.999 * found.losses[0]
    assert all(gradient.norm() > 1e-6 for gradient in found.gradients.values())


def test_the_reference_with_an_adapter_has_nonzero_gradients(references):
    gradients = references(PLAIN | {"adapter": "lora"}).gradients  # three steps are too few for the loss to fall
    assert all(gradient.norm() > 1e-6 for gradient in gradients.values())


def test_lower_precision_follows_float32_and_keeps_float32_masters(references):
    plain = references(PLAIN)
    for precision in set(cover.FACTORS["precision"]) - {"float32", "bfloat16 states"}:
        found = references(PLAIN | {"precision": precision})
        assert found.dtypes == {torch.float32}
        assert 1e-7 < compare(found, plain).worst("losses").size < 5e-3
        assert compare(found, plain).worst("gradients").size > 1e-3


# ----------------------------------------------------------------------------------- only in `make test-all` and campaigns

# `make campaign PART=tests` runs the others of this file; `PART=cells` and `PART=pipelines` run full products.


@pytest.mark.slow
@pytest.mark.parametrize("values", AT_ONCE, ids=[cover.name(PLAIN | values) for values in AT_ONCE])
def test_all_mesh_dimensions_at_once_equal_one_process(pools, references, values):
    assert_as_on_one_process(pools, references, PLAIN | values)


OTHERS = {cover.name(cell): cell for cell in cover.cover(without=LATER - OTHER_FLOAT8 - OTHER_PIPELINES, beyond=LATER)}
FEW_OTHERS = cover.few(OTHERS, cover.with_schedules)


@pytest.mark.parametrize("name", campaign_but((), [name for name in OTHERS if OTHERS[name]["compile"] == "no"], FEW_OTHERS))
def test_other_float8_recipes_and_pipelines_equal_one_process(pools, references, name):
    assert_as_on_one_process(pools, references, OTHERS[name])


@needs_compiler
@pytest.mark.parametrize("name", campaign_but((), FEW_COMPILED, dict.fromkeys([*FEW_COMPILED, *COMPILED])))
def test_inductor_kernels_equal_one_plain_process(pools, references, name):
    # New workers, since a run compiles in processes of its own. In those of earlier cells, three have failed in two runs:
    # PyTorch 2.13 traced a mesh as an operation that inductor refuses, "device_mesh._get_submesh is not an OpOverload".
    pools[ranks_of(cells.degrees_of(CELLS[name]["mesh"]))].stop()
    assert_as_on_one_process(pools, references, CELLS[name], "inductor")
