"""Tensor parallelism whose communication is overlapped by the compiler.

The operations that it puts in exist for CUDA alone, and take memory that GPUs share. On a CPU PyTorch's own stand-ins, which
compute the same one after the other, take their place: so the graphs, and what they compute, are those of a GPU.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import library as operators
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _symmetric_memory as symmetric

from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, config_of, mesh_of, rank_batches
from titanlite.config.schema import Config
from titanlite.loop.step import build_model, forward_backward
from titanlite.parallel import tensor
from titanlite.registry.family import family_of

TP = {"tp": 2}
GATHER, SUM = "symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"
_STAND_INS = {
    "fused_all_gather_matmul": symmetric._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric._fused_matmul_reduce_scatter_fallback,
}


def gradients(config: Config) -> tuple[float, dict[str, torch.Tensor], list[Counter[str]]]:
    """Loss and gradients of one step on two ranks, and what each graph does that has to do with communication."""
    torch._dynamo.reset()
    graphs: list[Counter[str]] = []

    def watched(graph: torch.fx.Graph) -> None:
        micro_pipeline_tp_pass(graph)
        graphs.append(Counter(str(node.target) for node in graph.nodes if node.op == "call_function"))

    mesh = mesh_of(TP)
    with ExitStack() as stack:
        stack.enter_context(inductor.patch(fx_graph_cache=False, _micro_pipeline_tp=False))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        if config.parallelism.enable_async_tensor_parallel:
            library = stack.enter_context(operators._scoped_library("symm_mem", "IMPL"))
            for name, function in _STAND_INS.items():
                library.impl(name, function, "CPU")
            stack.enter_context(symmetric._test_mode())
            stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
            stack.enter_context(patch.object(post_grad, "micro_pipeline_tp_pass", watched))
            stack.enter_context(patch.object(tensor, "enable_symm_mem_for_group", _checked))
        model = build_model(family_of(config.model), config, mesh, CPU)
        loss = forward_backward(model, next(rank_batches(config, mesh)), mesh).share
        found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return loss.item(), found, graphs


def _checked(name: str) -> None:
    assert name == mesh_of(TP).get_group("tp").group_name


def run(pools: dict[int, Pool], overlap: bool) -> Any:
    config = config_of(
        TP,
        parallelism={"tensor_parallel_degree": 2, "enable_async_tensor_parallel": overlap},
        compile={"enable": overlap, "components": ["model"]},
    )
    return pools[2].run("tests.distributed.test_async_tensor_parallel:gradients", config=config)[0]


@pytest.mark.slow  # inductor
def test_the_compiler_finds_gathers_and_sums_and_the_gradients_are_the_same(pools):
    plain_loss, plain, _ = run(pools, False)
    loss, found, graphs = run(pools, True)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, gradient in plain.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    block = next(graph for graph in graphs if graph[SUM])
    # a block's forward pass: each of two sublayers gathers for its first products and adds up its last one, all overlapped
    assert (block[GATHER], block[SUM]) == (2, 2)
    assert not any("_c10d_functional" in operation for operation in block)
    # its backward pass gathers the gradients of the two sums into the products that need them
    backward = [graph for graph in graphs if graph[GATHER] and not graph[SUM]]
    assert backward and all(graph[GATHER] >= 2 for graph in backward)


def test_without_it_the_pass_stays_off(pools):
    pools[2].run("tests.distributed.test_async_tensor_parallel:stays_off")


def stays_off() -> None:
    with inductor.patch(_micro_pipeline_tp=True):  # as a model before this one in the process would leave it
        tensor.overlap_tensor_parallel(False, mesh_of(TP)["tp"])
        assert inductor._micro_pipeline_tp is False
