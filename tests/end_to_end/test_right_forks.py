"""Forks as a researcher writes them, correct on every mesh: check-model passes each one."""

import pytest

from tests.end_to_end.test_check_model import failed, not_run, pooled, table, trained  # noqa: F401
from tests.repetitions import campaign_but
from titanlite.verify.compare import compare
from titanlite.verify.table import BEHAVIOR, COMPILED, DOCUMENTS, RECOMPUTED, ROWS, TRAINED

pytestmark = pytest.mark.usefixtures("pooled")
FORKS = [
    "own_router",
    "parallel_block",
    "latent_attention",
    "dense_mixture",
    "value_residual",
    "linear_attention",
    "bidirectional",
    "looped",
    "routed_by_choice",
    "shared_attention",
]
OF_CODE = (TRAINED, *BEHAVIOR, RECOMPUTED, COMPILED, "2 x 2", "context 2", "pipeline 2")
# in `make test-all`; the others in a campaign
OFTEN = ("own_router", "dense_mixture", "linear_attention", "routed_by_choice", "shared_attention")
every_fork = pytest.mark.parametrize("fork", FORKS)


@pytest.mark.parametrize("fork", campaign_but((), OFTEN, FORKS))
def test_a_right_fork_passes_every_row(fork):
    """The first one every row; the others those that depend on their code."""
    rows = table(f"tests.forks.right.{fork}", *() if fork == FORKS[0] else OF_CODE)
    left_out = ["context 2"] if fork == "linear_attention" else []  # its own attention cannot split sequences
    assert failed(rows) == {} and not_run(rows) == left_out


@every_fork
def test_the_tables_flops_and_documents_of_a_right_fork_pass(fork):
    assert failed(table(f"tests.forks.right.{fork}", *ROWS[: ROWS.index(TRAINED)], DOCUMENTS)) == {}


@pytest.mark.parametrize("fork", FORKS[:1])  # `make test-all` compares this mesh and others of all forks, above
def test_tensor_parallelism_does_not_change_any_gradient_of_a_right_fork(pools, fork):
    name = f"tests.forks.right.{fork}"
    alone, split = trained(pools, name, "plain", {}, {}), trained(pools, name, "plain", {}, {"tp": 2}, ranks=2)
    assert alone.faults == split.faults == []
    assert compare(split.trajectory, alone.trajectory).excessive == []


@pytest.mark.slow
def test_compiled_blocks_that_share_a_module_are_sharded(pools):
    """As a unit of its own it had hooks of FSDP inside of the blocks, where the compiler stopped."""
    name, sections = "tests.forks.right.shared_attention", {"compile": {"enable": True, "backend": "aot_eager"}}
    alone, split = trained(pools, name, "plain", {}, {}), trained(pools, name, "plain", sections, {"dp_shard": 2}, ranks=2)
    assert alone.faults == split.faults == []
    assert compare(split.trajectory, alone.trajectory).excessive == []
