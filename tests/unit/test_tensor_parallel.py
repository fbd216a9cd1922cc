"""Tensor parallelism of a simulated rank: copies around its collectives, and the sequences of its tokens."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.moe import RouterLosses
from tests.distributed.scenarios import CPU, config_of
from titanlite.data.batch import Batch
from titanlite.loop.step import build_model, forward_backward
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.plan.step import simulated_ranks
from titanlite.registry.family import family_of

COPIES = ("aten::cat", "aten::stack", "aten::clone", "aten::copy_")
COLLECTIVES = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor")


class BesideCollectives(TorchDispatchMode):
    """Counts collectives, and copies as large as `size` that produce their input or read their result."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: Counter[str] = Counter()
        self.copied: set[int] = set()  # storages that a copy has created
        self.received: set[int] = set()
        self.alive: list[torch.Tensor] = []  # so that no storage is reused

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its operations are dispatched again on local tensors
        result, name = operation(*args, **(kwargs or {})), operation._schema.name
        read, made = (
            [each for each in tree_leaves(tensors) if isinstance(each, torch.Tensor)] for tensors in ((args, kwargs), result)
        )
        self.alive += made
        sources = {each.untyped_storage()._cdata for each in read}
        results = {each.untyped_storage()._cdata for each in made}
        if name in COLLECTIVES:
            self.found[name.partition("::")[2]] += 1
            self.found["copies before"] += bool(sources & self.copied)
        elif name == "_c10d_functional::wait_tensor":
            self.received |= results
        elif name in COPIES and made[0].numel() == self.size:
            self.copied |= results
            self.found["copies after"] += bool(sources & self.received)
        return result


def test_collectives_send_and_receive_without_a_copy():
    """With a batch of two: joining ranks along the second of two dimensions would copy all hidden states."""
    batch = 2
    training = {"global_batch_size": batch, "local_batch_size": batch}
    config = config_of({"tp": 2}, training=training, parallelism={"tensor_parallel_degree": 2})
    family = family_of(config.model)
    with simulated_ranks(2):
        mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1) | {"tp": 2}, "cpu")
        model = build_model(family, config, mesh, CPU)
        with BesideCollectives(batch * config.training.seq_len * family.config.dim) as beside:
            forward_backward(model, Batch(torch.zeros(1, batch, config.training.seq_len + 1, dtype=torch.int64)), mesh)
    # each of 2 blocks gathers and sums twice, in both directions; embedding and head once in each
    assert {name: count for name, count in beside.found.items() if count} == {
        "all_gather_into_tensor": 2 * 4 + 2,
        "reduce_scatter_tensor": 2 * 4 + 2,
    }


@pytest.mark.parametrize(("rows", "slices"), [(1, 4), (3, 2), (5, 1), (6, 4)])
def test_the_sequences_of_a_slice_are_those_of_its_tokens(rows, slices):
    length = 8 * slices
    tokens = torch.arange(rows).repeat_interleave(length)  # each token's sequence, one sequence after the other
    for number, part in enumerate(tokens.chunk(slices)):
        found = RouterLosses(0.0, 0.0, slices, "", slices, number).sequences(rows, CPU)
        assert torch.equal(found.repeat_interleave(length // slices), part)
