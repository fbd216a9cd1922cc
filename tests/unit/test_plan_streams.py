"""The bytes that the model of time counts for elementwise work are those of inductor's fused kernels."""

import operator
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13, register_partitioning
from titanlite.parallel.mesh import build_mesh, resolve_degrees
from titanlite.plan import fused
from titanlite.plan.job import job_of
from titanlite.plan.step import Setup, measure_memory, simulated_ranks
from titanlite.plan.time import Choice, forward
from titanlite.registry.family import family_of

TOKENS, BACKEND = 1088, "count_elementwise"  # a number that no dimension of a model is


def is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return bool(getattr(node.target, "is_view", False))


def is_inside(node: Node) -> bool:
    """Whether an elementwise kernel computes it."""
    if node.target is operator.getitem:
        return is_view(node)
    return fused._is_inside(node) or fused._has_tag(node, "reduction")


def moved(graph: GraphModule, results: dict[Node, Any]) -> int:
    """Bytes that the fused elementwise kernels of a graph read and write.

    A kernel has all operations that the same number of matmuls precede. Sums over tokens are a kernel of their own.
    """
    inside = {n for n in graph.graph.nodes if is_inside(n)}
    size = {n: v.nbytes if isinstance(v, torch.Tensor) else 0 for n, v in results.items()}
    depth: dict[Node, int] = {}
    for node in graph.graph.nodes:
        depth[node] = max((depth[each] + (each not in inside) for each in node.all_input_nodes), default=0)

    def is_read_outside(node: Node) -> bool:
        return any(is_read_outside(each) if is_view(each) else each not in inside for each in node.users)

    def over_tokens(node: Node) -> bool:
        return fused._has_tag(node, "reduction") and TOKENS not in results[node].shape

    written = {n for n in inside if not is_view(n) and (is_read_outside(n) or over_tokens(n))}

    def read_by(node: Node) -> set[Node]:
        found: set[Node] = set()
        for each in node.all_input_nodes:
            found |= {each} if each in written or each not in inside else read_by(each)
        return found

    kernels: dict[tuple[int, bool], set[Node]] = defaultdict(set)
    for node in written:
        kernels[depth[node], over_tokens(node)].add(node)
    return sum(size[node] for own in kernels.values() for node in set().union(*map(read_by, own)) | own)


class Run(Interpreter):
    """Computes a graph and keeps its results."""

    def __init__(self, graph: GraphModule, arguments: list[Any]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.results = dict(zip((node for node in graph.graph.nodes if node.op == "placeholder"), arguments, strict=True))

    def run_node(self, n: Node) -> Any:
        self.results[n] = super().run_node(n)
        return self.results[n]


@pytest.fixture(scope="module")
def counted() -> list[int]:
    """Bytes of each graph that has run."""
    found: list[int] = []

    def run(graph: GraphModule, arguments: list[Any]) -> Any:
        interpreter = Run(graph, arguments)
        result = interpreter.boxed_run(arguments)
        found.append(moved(graph, interpreter.results))
        return result

    register_partitioning(BACKEND, run)
    return found


@pytest.mark.skipif(BEFORE_2_13, reason="2.11's partitioner fails with grouped queries")
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ("gemma3:4b", "selective"),
        *(pytest.param("llama3:8b", mode, marks=pytest.mark.slow) for mode in ("none", "selective")),
        pytest.param("olmo2:7b", "none", marks=pytest.mark.slow),
    ],
)
def test_the_elementwise_bytes_of_a_block_are_those_of_its_fused_kernels(model, recompute, counted):
    name, flavor = model.split(":")
    training = {"seq_len": TOKENS, "local_batch_size": 1, "global_batch_size": 1, "dtype": "bfloat16"}
    config = Config.model_validate(
        {
            "model": {"name": name, "flavor": flavor},
            "training": training,
            "activation_checkpoint": {"mode": recompute},
            "compile": {"enable": True, "components": ["model"], "backend": BACKEND},
        }
    )
    family = family_of(config.model)
    counted.clear()
    with simulated_ranks(1):
        mesh = build_mesh(resolve_degrees(config.parallelism, 1), "cpu")
        measure_memory(Setup(family, config, mesh, "cuda", "balanced", True), ["0"], False)
    job = job_of(config, "h200", 8, 1)
    layer = next(layer for layer, _ in job.shape.layers)
    once = forward(job, layer, Choice()).elementwise * job.device.memory_gb_per_second * 1e9
    passes = 3 if recompute == "none" else 4
    assert sum(counted) / 2 == pytest.approx(passes * once, rel=0.15), "two microbatches have run"
