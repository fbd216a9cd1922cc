"""The collectives that gloo ranks start in a step are those that titanlite/plan predicts: calls, groups and bytes.

The counter here shares no code with titanlite/plan. tests/unit/test_plan.py has other meshes, without ranks.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import all_to_all
from models.moe import Router
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, mesh_of, rank_batches
from tests.repetitions import campaign_but
from tests.traffic_cases import CASES, COUNTED, Case
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.plan.predict import predict
from titanlite.registry.family import family_of

# PyTorch's operations, of FSDP2 and of DTensor: the collective, and the position of the full tensor among the arguments; None:
# it is the result.
_OPERATIONS = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "allreduce_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "alltoall_base_": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", None),
    "send": ("send", 0),
}
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "recv_")


class Sent(TorchDispatchMode):
    """(collective, ranks of the group) -> calls and bytes of the full tensors. An unknown operation is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor subclass such as DTensor: its operations are dispatched again on the inner tensors
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.partition("::")[2]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in _NO_COLLECTIVES:
            kind, place = _OPERATIONS[name]
            tensors = tree_leaves(result if place is None else args[place])
            channel = kind, _ranks_of(operation, args)
            self.calls[channel] += 1
            self.bytes[channel] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result

    def kinds(self) -> Counter[str]:
        """The number of collectives of each kind in groups of several ranks."""
        return sum((Counter({kind: calls}) for (kind, ranks), calls in self.calls.items() if len(ranks) > 1), Counter())


def _ranks_of(operation: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The ranks of an operation's group, an object or a name."""
    names = [argument.name for argument in operation._schema.arguments]
    given = args[names.index("process_group" if "process_group" in names else "group_name")]
    group = dist.distributed_c10d._resolve_process_group(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)
    return tuple(dist.get_process_group_ranks(group))


def second_step(degrees: dict[str, int], config: Config) -> dict[Any, tuple[int, int]]:
    """Calls and bytes that this rank sent in its second step."""
    mesh = mesh_of(degrees)
    model = build_model(family_of(config.model), config, mesh, CPU)
    optimizer = build_optimizer(model, config.optimizer)
    batches = rank_batches(config, mesh)
    for _ in range(2):
        batch = next(batches)
        with Sent() as sent:
            forward_backward(model, batch, mesh)
            update(model, optimizer, 1e-3, 1.0)
    return {key: (calls, sent.bytes[key]) for key, calls in sent.calls.items()}


def group_of_rank_0(degrees: dict[str, int], over: tuple[str, ...], ranks: int) -> tuple[int, ...]:
    """The first `ranks` of those that share all other dimensions of the mesh with rank 0; of these, tp changes the fastest."""
    strides, stride = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate"):
        strides[name], stride = stride, stride * degrees.get(name, 1)
    members = [0]
    for name in ("dp_replicate", "dp_shard", "cp", "tp"):
        if name in over:
            members = [member + place * strides[name] for member in members for place in range(degrees[name])]
    return tuple(members[:ranks])


# A formula by shapes, accumulation, and cases without a formula: Muon, gathers in float8, weights of features.
SHORT = ["hybrid, tied, accumulation", "shard 2 x context 2, documents, full recomputation"]
LONGER = [
    "2 x 2, Muon",
    "shard 2, gathers in float8",
    "hybrid, accumulation, reduced once",
    "tp 2, float8",
    "context 4, heads exchanged, bfloat16",
]
ON_GLOO = [
    *SHORT,
    *LONGER,
    "vocabulary 515, 2 x 2",
    "2 x 2, adapters, every second of four layers",
    "tp 2, weights of features",
    "context 2 x tp 2, windows and caps, recomputation by operation",
]


@pytest.mark.parametrize("name", campaign_but(SHORT, LONGER, ON_GLOO))
def test_a_step_sends_what_is_predicted(pools: dict[int, Pool], name):
    case = (CASES | COUNTED)[name]
    config = case.config()
    if BEFORE_2_13 and config.training.mixed_precision_param == "bfloat16":
        pytest.skip("a prediction in bfloat16 needs PyTorch 2.13")
    calls, sizes = Counter(), Counter()
    for channel, traffic in predict(config, case.ranks, "cpu").work.traffic.items():
        key = channel.kind, group_of_rank_0(case.degrees, channel.over, channel.ranks)
        calls[key] += traffic.calls
        sizes[key] += traffic.size
    ranks = pools[case.ranks].run("tests.distributed.test_communication:second_step", degrees=case.degrees, config=config)
    # a group of one rank sends nothing
    sent = {key: numbers for key, numbers in ranks[0].items() if len(key[1]) > 1}
    assert sent == {key: (calls[key], sizes[key]) for key in calls}


# ------------------------------------------------------------------------------------------------- experts split over ranks


def balanced(router: Router, scores: Tensor) -> Tensor:
    """Each pair of experts equally often, in every part of the tokens."""
    pairs = torch.combinations(torch.arange(scores.shape[1]), router.top_k)
    return pairs[torch.arange(len(scores)) * 5 % len(pairs)]


def worst(router: Router, scores: Tensor) -> Tensor:
    """The first experts, which rank 0 has."""
    return torch.arange(router.top_k).repeat(len(scores), 1)


def step_with_exchange(degrees: dict[str, int], config: Config, choose: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """(collective, ranks) -> calls and bytes of a step with these choices; modes do not see into the operation that
    exchanges rows, so that its calls are counted in its module."""
    sizes: list[tuple[int, int]] = []

    def counted(result: Tensor, rows: Tensor, *splits: Any, group: Any, async_op: bool = False) -> Any:
        sizes.append((group.size(), rows.numel() * rows.element_size()))
        return dist.all_to_all_single(result, rows, *splits, group=group, async_op=async_op)

    inside = SimpleNamespace(all_to_all_single=counted)
    with mock.patch.object(Router, "choose", choose), mock.patch.object(all_to_all, "dist", inside):
        seen = second_step(degrees, config)
    calls, total = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for (kind, ranks), (number, size) in seen.items():
        calls[kind, len(ranks)] += number
        total[kind, len(ranks)] += size
    for ranks, size in sizes[len(sizes) // 2 :]:  # of the second of two steps
        calls["all-to-all", ranks] += 1
        total["all-to-all", ranks] += size
    return {key: (calls[key], total[key]) for key in calls if key[1] > 1}


FOUR_CHUNKS = {"dp_shard": 4, "ep": 2}, "full", 0.7


@pytest.mark.parametrize(
    ("cell", "routing"),
    [
        (FOUR_CHUNKS, worst),
        (({"dp_shard": 4, "ep": 4, "node": 2}, "full", 0.7), balanced),
        pytest.param(FOUR_CHUNKS, balanced, marks=pytest.mark.campaign),
        pytest.param(({"dp_shard": 2, "tp": 2, "ep": 4}, "per operation", 1.5), balanced, marks=pytest.mark.slow),
        pytest.param(({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "none", 1.5), balanced, marks=pytest.mark.campaign),
    ],
    ids=["four chunks, worst", "two nodes", "four chunks", "tp, by operation", "replicas"],
)
def test_a_step_with_split_experts_sends_what_is_predicted(pools, cell, routing):
    """The prediction equals what gloo is given on rank 0, but for how many experts of a token are on one rank: on average."""
    degrees, reduced, factor = cell
    mesh = {dimension: degree for dimension, degree in degrees.items() if dimension not in ("ep", "node")}
    node, several = degrees.get("node", 1), {"moe": {"max_tokens_factor": factor}}
    split = {"expert_parallel_degree": degrees["ep"], "expert_parallel_node_size": node}
    case = Case(mesh, reduced=reduced, name="tests.tiny_moe", parallelism=split, others=several)
    calls, sizes = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for channel, traffic in predict(case.config(), case.ranks, "cpu", routing.__name__).work.traffic.items():
        calls[channel.kind, channel.ranks] += traffic.calls
        sizes[channel.kind, channel.ranks] += traffic.size
    function = "tests.distributed.test_communication:step_with_exchange"
    sent = pools[case.ranks].run(function, degrees=degrees, config=case.config(), choose=routing)[0]
    key = "all-to-all", node if node > 1 else degrees["ep"]  # as many nodes as ranks of one
    (found_calls, found), expected = sent.pop(key), sizes.pop(key)
    print(found_calls, calls[key], found / expected)
    assert found_calls == calls.pop(key) and abs(found / expected - 1) < 0.25
    assert sent == {key: (calls[key], sizes[key]) for key in calls}
