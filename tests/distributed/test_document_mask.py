"""P1 with documents, as on a GPU: FlexAttention on meshes. test_cover.py has the dense mask of a CPU."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from models import attention, llama3
from models.attention import SeqInfo, block_mask
from tests.distributed import cells
from tests.distributed.cover import PLAIN, Cell
from tests.distributed.scenarios import GRAPHS, degrees_of
from titanlite.config.schema import Config
from titanlite.parallel.mesh import ranks_of
from titanlite.verify.compare import Trajectory

HERE = "tests.distributed.test_document_mask"


def with_flex_attention(cell: Cell, config: Config) -> tuple[Trajectory | None, int]:
    """With the plain implementation, whose backward pass works on a CPU if the check is bypassed."""
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True, backend="aot_eager")

    def with_block_mask(seq: SeqInfo) -> SeqInfo:
        return seq._replace(mask=block_mask(seq.documents, positions=seq.split and seq.split.positions))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama3, "with_mask", with_block_mask)
        patch.setattr(flex, "_validate_device", lambda *tensors: None)
        patch.setattr(attention, "_compiled_flex_attention", lambda: compiled)
        return cells.trajectory(cell, config)


@pytest.mark.parametrize(
    ("mesh", "mode", "compiled"),
    [
        pytest.param("tp 2", "budget", "blocks", marks=pytest.mark.slow),
        ("context 2", "per operation", "no"),
        pytest.param("shard 2 x tp 2", "full", "no", marks=pytest.mark.slow),
        pytest.param("context 2 x tp 2", "none", "blocks", marks=pytest.mark.campaign),
    ],
)
def test_flex_attention_works_with_meshes_checkpointing_and_compile(pools, mesh, mode, compiled):
    cell = PLAIN | {"mesh": mesh, "recompute": mode, "compile": compiled, "documents": "many"}
    pool, words = pools[ranks_of(degrees_of(mesh))], {"cell": cell, "config": cells.config_of_cell(cell)}
    found, graphs = pool.run(f"{HERE}:with_flex_attention", **words)[0]
    reference, _ = cells.run(pools, cells.reference_of(cell))
    assert cells.faults(cell, found, reference) == []
    assert graphs == (GRAPHS if compiled == "blocks" else 1)  # otherwise only FlexAttention is compiled
