"""Tensor parallelism whose communication is overlapped by the compiler.

The operations that it inserts exist only for CUDA, and need memory that GPUs share. On a CPU, PyTorch's sequential fallbacks
replace them, so the graphs and their results are those of a GPU.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import library as operators
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _symmetric_memory as symmetric

from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, config_of, mesh_of, rank_batches
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.loop.step import build_model, forward_backward
from titanlite.parallel import tensor
from titanlite.registry.family import family_of

TP = {"tp": 2}
COMPILED = {"enable": True, "components": ["model"]}
GATHER, SUM = "symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"
SCALED_SUM = "symm_mem.fused_scaled_matmul_reduce_scatter.default"
PLAIN_GATHER = "_c10d_functional.all_gather_into_tensor.default"
PLAIN_SUM = "_c10d_functional.reduce_scatter_tensor.default"
_ATEN = torch.ops.aten
OFF = {"_micro_pipeline_tp": False, "post_grad_custom_pre_pass": None}
COPIES = (_ATEN.cat.default, _ATEN.clone.default, _ATEN.copy.default)
_STAND_INS = {
    "fused_all_gather_matmul": symmetric._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric._fused_matmul_reduce_scatter_fallback,
    "fused_all_gather_scaled_matmul": symmetric._fused_all_gather_scaled_matmul_fallback,
    "fused_scaled_matmul_reduce_scatter": symmetric._fused_scaled_matmul_reduce_scatter_fallback,
}


class Graph(NamedTuple):
    """The communication of a compiled graph."""

    operations: Counter[str]  # after the compiler's pass
    copies: list[str]  # before the pass: operations that copy the hidden states of all tokens


def gradients(config: Config) -> tuple[float, dict[str, torch.Tensor], list[Graph]]:
    """Loss and gradients of one step on two ranks, and the graphs of its blocks."""
    torch._dynamo.reset()
    graphs: list[Graph] = []
    hidden = config.training.local_batch_size * config.training.seq_len * family_of(config.model).config.dim

    def watched(graph: torch.fx.Graph) -> None:
        copies = [node for node in graph.nodes if node.target in COPIES and node.meta["val"].numel() == hidden]
        micro_pipeline_tp_pass(graph)
        done = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
        graphs.append(Graph(done, [f"{node.target} {tuple(node.meta['val'].shape)}" for node in copies]))

    mesh = mesh_of(TP)
    with ExitStack() as stack:
        stack.enter_context(inductor.patch(OFF))
        stack.enter_context(patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=with_passes)))
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


def with_passes(graph: torch.fx.GraphModule, inputs: list[Any], is_inference: bool = False, **_: Any) -> Callable[..., Any]:
    """A graph after inductor's passes, whose operations run one by one: its C++ code takes minutes to compile."""
    compile_fx.view_to_reshape(graph)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(graph, inputs)
    with compile_fx.V.set_fake_mode(mode):
        post_grad.post_grad_passes(graph, is_inference)
    return make_boxed_func(graph.forward)


def _checked(name: str) -> None:
    assert name == mesh_of(TP).get_group("tp").group_name


def run(pools: dict[int, Pool], overlap: bool, **sections: dict[str, Any]) -> Any:
    sections["training"] = {"global_batch_size": 2, "local_batch_size": 2} | sections.get("training", {})
    parallelism = {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": overlap}
    config = config_of(TP, parallelism=parallelism, **sections)
    return pools[2].run("tests.distributed.test_async_tensor_parallel:gradients", config=config)[0]


@pytest.mark.slow
def test_the_compiler_finds_gathers_and_sums_and_the_gradients_are_the_same(pools):
    plain_loss, plain, _ = run(pools, False)
    loss, found, graphs = run(pools, True, compile=COMPILED)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, gradient in plain.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    forward, backward = graphs  # of all blocks
    assert (forward.copies, backward.copies) == ([], [])
    # the forward pass: each of two sublayers gathers for its first matmuls and reduce-scatters its last one, all overlapped
    assert (forward.operations[GATHER], forward.operations[SUM]) == (2, 2)
    assert not any("_c10d_functional" in operation for operation in forward.operations)
    # the backward pass gathers the gradients of the two sums into the matmuls that need them; its own sums are of several
    assert (backward.operations[GATHER], backward.operations[SUM], backward.operations[PLAIN_SUM]) == (2, 0, 2)
    assert not backward.operations[PLAIN_GATHER]


_NOT_BEFORE = pytest.mark.skipif(BEFORE_2_13, reason="PyTorch 2.11 scales no rows of a product on CPUs")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tensorwise", marks=pytest.mark.slow),
        pytest.param("rowwise", marks=[pytest.mark.campaign, _NOT_BEFORE]),
    ],
)
def test_with_float8_it_overlaps_the_sums_of_the_forward_pass(pools, recipe):
    """Both runs are compiled: eager code rounds to bfloat16 in other places."""
    sections = {
        "training": {"mixed_precision_param": "bfloat16"},
        "float8": {"enable": True, "recipe_name": recipe},  # not emulated: what the pass matches are float8 matmuls
        "compile": COMPILED,
    }
    plain_loss, plain, _ = run(pools, False, **sections)
    loss, found, (forward, backward) = run(pools, True, **sections)
    assert loss == plain_loss and all(torch.equal(found[name], gradient) for name, gradient in plain.items())
    assert (forward.operations[SCALED_SUM], forward.operations[PLAIN_SUM]) == (2, 0)
    # not overlapped: layers cast what they have received, and other matmuls than the sum's last one are in between
    assert (forward.operations[PLAIN_GATHER], backward.operations[PLAIN_GATHER], backward.operations[PLAIN_SUM]) == (2, 2, 2)


def test_without_it_the_pass_stays_off(pools):
    pools[2].run("tests.distributed.test_async_tensor_parallel:stays_off")


def stays_off() -> None:
    with inductor.patch(_micro_pipeline_tp=True, post_grad_custom_pre_pass=print):  # as an earlier model leaves them
        tensor.overlap_tensor_parallel(False, mesh_of(TP)["tp"])
        assert {name: getattr(inductor, name) for name in OFF} == OFF
