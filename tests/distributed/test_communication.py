"""What a step sends is what `titanlite/plan/communication.py` reckons: every collective, over every group, and every byte."""

import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, MODES, config_of, mesh_of, rank_batches
from titanlite.config.schema import Config
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.parallel.mesh import resolve_degrees
from titanlite.plan.communication import Transfer, lines, traffic
from titanlite.transforms.registry import family_of

# PyTorch's operations, of FSDP2 and of DTensor: what each is, and where the whole tensor stands among its arguments; None: it
# is the result.
_OPERATIONS = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "allreduce_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
}
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class Sent(TorchDispatchMode):
    """(what is done, ranks of the group, bytes of the whole tensor) -> how often. An operation that it does not know fails."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on the local tensors
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.partition("::")[2]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in _NO_COLLECTIVES:
            kind, place = _OPERATIONS[name]
            tensors = tree_leaves(result if place is None else args[place])
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.found[kind, _ranks_of(operation, args), size] += 1
        return result


def _ranks_of(operation: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The ranks of the group that an operation was given, as an object or by its name."""
    names = [argument.name for argument in operation._schema.arguments]
    given = args[names.index("process_group" if "process_group" in names else "group_name")]
    group = dist.distributed_c10d._resolve_process_group(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)
    return tuple(dist.get_process_group_ranks(group))


class _Anywhere:
    """In place of CommDebugMode's tracker of modules, which loses its way where they are called again for recomputation."""

    name, is_bw, activation_checkpointing = "", False, False
    module_parents_dict: dict[str, set[str]] = {"": set()}  # noqa: RUF012

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def second_step(degrees: dict[str, int], config: Config) -> tuple[Counter[Any], Counter[Any], int]:
    """What this rank sent in its second step, what it should have, and how many collectives CommDebugMode has seen."""
    mesh = mesh_of(degrees)
    family = family_of(config.model)
    model = build_model(family, config, mesh, CPU)
    optimizer = build_optimizer(model, config.optimizer)
    batches = rank_batches(config, mesh)
    for _ in range(2):
        batch = next(batches)
        official, sent = CommDebugMode(), Sent()
        official.advanced_module_tracker = _Anywhere()
        with official, sent:
            forward_backward(model, batch, mesh, None, config.parallelism.reduce_every_microbatch)
            update(model, optimizer, 1e-3, 1.0)
    expected: Counter[Any] = Counter()
    for each in traffic(config, family, resolve_degrees(config.parallelism, dist.get_world_size()), "cpu"):
        expected[each.kind, _group(mesh, each.over, each.ranks), each.size] += each.count
    return sent.found, expected, official.get_total_counts()


def _group(mesh: Any, over: tuple[str, ...], ranks: int) -> tuple[int, ...]:
    """The ranks that this one shares dimensions of the mesh with; `ranks` adjacent ones where it is a part of them."""
    if len(over) > 1:
        return tuple(range(dist.get_world_size()))
    whole = mesh[over[0]].mesh.tolist()
    first = whole.index(dist.get_rank()) // ranks * ranks
    return tuple(whole[first : first + ranks])


class Case(NamedTuple):
    """A mesh, and what is special about the step on it."""

    degrees: dict[str, int]
    flavor: str = "plain"
    accumulation: int = 1
    reduced: str = "none"  # what is computed again
    name: str = "tests.tiny"
    parallelism: dict[str, Any] | None = None
    training: dict[str, Any] | None = None

    def config(self) -> Config:
        names = {
            "dp_replicate": "data_parallel_replicate_degree",
            "dp_shard": "data_parallel_shard_degree",
            "tp": "tensor_parallel_degree",
        }
        return config_of(
            self.degrees,
            self.flavor,
            self.accumulation,
            model={"name": self.name},
            activation_checkpoint=MODES[self.reduced],
            parallelism={names[key]: degree for key, degree in self.degrees.items()} | (self.parallelism or {}),
            training=self.training or {},
        )


LATE = {"reduce_every_microbatch": False}
ALWAYS, NEVER = {"fsdp_reshard_after_forward": "always"}, {"fsdp_reshard_after_forward": "never"}
SHARD, TP, BOTH, HYBRID = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
HALF = {"mixed_precision_param": "bfloat16"}

CASES = {
    "one process": Case({}),
    "shard 2": Case(SHARD),
    "shard 4": Case({"dp_shard": 4}),
    "shard 2, bfloat16": Case(SHARD, training=HALF),
    "shard 2, bfloat16 reduced in bfloat16": Case(SHARD, training={**HALF, "mixed_precision_reduce": "bfloat16"}),
    "shard 2, always reshard": Case(SHARD, parallelism=ALWAYS),
    "shard 2, never reshard": Case(SHARD, parallelism=NEVER),
    "shard 4, reshard to 2": Case({"dp_shard": 4}, parallelism={"fsdp_reshard_after_forward": 2}),
    "shard 4, four layers, prefetch 2": Case({"dp_shard": 4}, "deep", parallelism={"fsdp_prefetch": 2}),
    "shard 2, accumulation": Case(SHARD, accumulation=2),
    "shard 2, accumulation, never reshard": Case(SHARD, accumulation=2, parallelism=NEVER),
    "shard 2, accumulation, reduced once": Case(SHARD, accumulation=2, parallelism=LATE),
    "shard 2, full recomputation": Case(SHARD, reduced="full"),
    "shard 2, tied": Case(SHARD, "tied"),
    "shard 2, tied, always reshard": Case(SHARD, "tied", parallelism=ALWAYS),
    "shard 2, tied, never reshard": Case(SHARD, "tied", parallelism=NEVER),
    "shard 4, tied, reshard to 2": Case({"dp_shard": 4}, "tied", parallelism={"fsdp_reshard_after_forward": 2}),
    "shard 2, tied, accumulation, reduced once": Case(SHARD, "tied", accumulation=2, parallelism=LATE),
    "replicate 2": Case({"dp_replicate": 2}),
    "replicate 2, accumulation, reduced once": Case({"dp_replicate": 2}, accumulation=2, parallelism=LATE),
    "hybrid": Case(HYBRID),
    "hybrid, tied, bfloat16": Case(HYBRID, "tied", training=HALF),
    "hybrid, accumulation, reduced once": Case(HYBRID, accumulation=2, parallelism=LATE),
    "tp 2": Case(TP),
    "tp 4": Case({"tp": 4}),
    "tp 2, bfloat16": Case(TP, training=HALF),
    "tp 2, tied": Case(TP, "tied"),
    "tp 2, full recomputation": Case(TP, reduced="full"),
    "tp 2, recomputation by operation": Case(TP, reduced="per operation"),
    "tp 2, every second of four layers": Case(TP, "deep", reduced="every second layer"),
    "tp 2, accumulation": Case(TP, accumulation=2),
    "tp 2, accumulation, reduced once, bfloat16": Case(TP, accumulation=2, parallelism=LATE, training=HALF),
    "tp 2, norms behind sublayers": Case(TP, name="tests.tiny_gemma3"),
    "tp 2, norms behind sublayers, full recomputation": Case(TP, name="tests.tiny_gemma3", reduced="full"),
    "tp 2, biases": Case(TP, name="tests.tiny_biased"),
    "2 x 2": Case(BOTH),
    "2 x 2, tied": Case(BOTH, "tied"),
    "2 x 2, bfloat16, full recomputation": Case(BOTH, reduced="full", training=HALF),
    "2 x 2, accumulation, reduced once": Case(BOTH, accumulation=2, parallelism=LATE),
    "replicate 2 x tp 2": Case({"dp_replicate": 2, "tp": 2}),
    "vocabulary 515, 2 x 2": Case(BOTH, "uneven"),
    "vocabulary 515, shard 4": Case({"dp_shard": 4}, "uneven"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_is_reckoned(pools: dict[int, Pool], name):
    case = CASES[name]
    config = case.config()
    found = pools[math.prod(case.degrees.values())].run(
        "tests.distributed.test_communication:second_step", degrees=case.degrees, config=config
    )
    uneven = case.flavor == "uneven" and "tp" in case.degrees  # rank 0 has more of the vocabulary than the others
    for sent, expected, seen in found[:1] if uneven else found:
        assert seen == sent.total()  # CommDebugMode's own count
        # a rank by itself is asked too, and sends nothing
        assert {key: count for key, count in sent.items() if len(key[1]) > 1} == expected


def test_the_loss_of_a_split_vocabulary_is_combined_chunk_by_chunk(pools):
    """Of 256 tokens in chunks of at most 100, which are equal and so of 64."""
    config = Case(TP, name="tests.tiny_chunked").config()
    sent, expected, _ = pools[2].run("tests.distributed.test_communication:second_step", degrees=TP, config=config)[0]
    assert sent == expected
    assert sent["all-gather", (0, 1), 2 * 2 * 64 * 4] == 4


@pytest.mark.parametrize("name", ["tests.tiny_olmo2", "tests.tiny"])
def test_modules_that_talk_between_ranks_by_themselves_are_not_reckoned_with(name):
    config = Case(TP, name=name).config()
    if name == "tests.tiny":
        config = config.model_copy(update={"lora": config.lora.model_copy(update={"enable": True})})
    with pytest.raises(ValueError, match="by themselves"):
        traffic(config, family_of(config.model), resolve_degrees(config.parallelism, 2))


def test_what_muon_exchanges_is_not_reckoned_with():
    config = Case(HYBRID).config()
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"name": "Muon"})})
    with pytest.raises(ValueError, match="Muon exchanges"):
        traffic(config, family_of(config.model), resolve_degrees(config.parallelism, 4))


def test_what_a_rank_sends_is_that_of_a_ring():
    assert Transfer("", "all-gather", ("tp",), 4, 3, 800).sent == 3 * 600
    assert Transfer("", "reduce-scatter", ("tp",), 4, 1, 800).sent == 600
    assert Transfer("", "all-reduce", ("tp",), 4, 1, 800).sent == 1200


def test_the_table_adds_up():
    config = Case(HYBRID).config()
    table = lines(traffic(config, family_of(config.model), resolve_degrees(config.parallelism, 4)))
    counts = [int(line.split(" x")[-2].split()[-1]) for line in table]
    assert counts[-1] == sum(counts[:-1]) == 18 - 1  # PyTorch sees 18 where the embedding is gathered again
