"""Forks as a researcher writes them, correct on every mesh: check-model passes each one."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from models.attention import SeqInfo
from models.blocks import positions_in_documents
from tests.end_to_end.test_check_model import failed, not_run, pooled, table, trained  # noqa: F401
from titanlite.registry.family import load_module
from titanlite.verify.compare import compare
from titanlite.verify.table import ROWS, TRAINED

pytestmark = pytest.mark.usefixtures("pooled")
FORKS = [
    "parallel_block",
    "latent_attention",
    "dense_mixture",
    "value_residual",
    "linear_attention",
    "own_router",
    "bidirectional",
    "looped",
    "routed_by_choice",
    "shared_attention",
]
every_fork = pytest.mark.parametrize("fork", FORKS)


@pytest.mark.slow
@every_fork
def test_a_right_fork_passes_every_row(fork):
    rows = table(f"tests.forks.right.{fork}")
    left_out = ["context 2"] if fork == "linear_attention" else []  # its own attention cannot split sequences
    assert failed(rows) == {} and [*not_run(rows)] == left_out


@every_fork
def test_the_tables_and_flops_of_a_right_fork_pass(fork):
    assert failed(table(f"tests.forks.right.{fork}", *ROWS[: ROWS.index(TRAINED)])) == {}


@pytest.mark.parametrize("fork", FORKS[:3])  # `make test-all` compares this mesh and others of all forks, above
def test_tensor_parallelism_does_not_change_any_gradient_of_a_right_fork(pools, fork):
    name = f"tests.forks.right.{fork}"
    alone, split = trained(pools, name, "plain", {}, {}), trained(pools, name, "plain", {}, {"tp": 2}, ranks=2)
    assert alone.faults == split.faults == []
    assert compare(split.trajectory, alone.trajectory).excessive == []


@every_fork
def test_a_document_in_a_packed_row_equals_the_document_alone_and_no_block_returns_a_view(fork):
    module = load_module(f"tests.forks.right.{fork}")
    model = module.Model(module.FLAVORS["plain"])
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for layer in model.layers.values():  # FSDP2 warns of views, since an in-place operation would drop their hook
        layer.register_forward_hook(lambda _module, _args, out: views.extend(o for o in tree_leaves(out) if o._is_view()))
    views: list[Tensor] = []
    tokens, documents = torch.randint(512, (1, 20)), torch.tensor([[0] * 7 + [1] * 12 + [2]], dtype=torch.int32)
    packed = model(tokens, SeqInfo(positions_in_documents(documents), documents))
    for part in (slice(0, 7), slice(7, 19), slice(19, 20)):
        alone = model(tokens[:, part], SeqInfo(torch.arange(part.stop - part.start)[None]))
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-4, atol=1e-4)
    assert views == []
