"""How inductor's kernels use memory: what they fuse has none of its own, and what they read stays until they have written."""

import functools
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from titanlite.ground.torch_private import register_partitioning
from titanlite.plan.record import in_kernel
from titanlite.transforms.activation_checkpoint import PARTITIONED

# Operations that inductor computes inside of kernels, beside those that PyTorch marks as pointwise, and views.
_MORE = {operator.getitem, torch.ops.aten.cat.default, torch.ops.aten.full.default}


@functools.cache
def register_backend() -> None:
    """The backend PARTITIONED of torch.compile, for predictions. Only once: the compiler allows no second one of the name."""
    register_partitioning(PARTITIONED, lambda graph, arguments: _Kernels(graph).boxed_run(arguments))


class _Kernels(Interpreter):
    """Runs the operations of a graph one by one. `Allocations` does not see the results of those that are fused."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=True)
        number = {node: index for index, node in enumerate(graph.graph.nodes)}
        last: dict[Node, Node] = {}  # that reads a node's result, by itself or in a kernel
        for node in reversed(number):
            until = last.get(node, node) if _is_fused(node) else node
            for each in node.all_input_nodes:
                last[each] = max(last.get(each, until), until, key=number.__getitem__)
        self.user_to_last_uses = {until: [each for each in last if last[each] is until] for until in last.values()}

    def run_node(self, n: Node) -> Any:
        with in_kernel(_is_fused(n)):
            return super().run_node(n)


def _is_fused(node: Node) -> bool:
    """Whether no result is written: others of the same kernels, or sums, are all that read it."""
    return _is_inside(node) and all(_is_inside(each) or _has_tag(each, "reduction") for each in node.users)


def _is_inside(node: Node) -> bool:
    return node.target in _MORE or getattr(node.target, "is_view", False) or _has_tag(node, "pointwise")


def _has_tag(node: Node, tag: str) -> bool:
    return getattr(torch.Tag, tag) in getattr(node.target, "tags", ())
