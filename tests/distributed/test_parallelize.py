"""Sharding besides numerics: gathers as often as configured, holds only its share, refuses wrong tables."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import SeqInfo, with_mask
from models.blocks import Computed, Identity, Normal, SwiGLU, Uniform
from models.head import Sizes
from models.rope import rotation
from tests import tiny
from tests.distributed.as_one import as_one_process
from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import CPU, config_of, first_microbatch, local_numbers, mesh_of, rank_batches, trajectory
from tests.distributed.test_communication import Sent
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model, forward_backward
from titanlite.parallel.fsdp import GradientSync
from titanlite.parallel.tensor import sharding_faults
from titanlite.registry.family import Family, load_family
from titanlite.verify.compare import compare, whole

HERE = "tests.distributed.test_parallelize"
SHARD, TP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}
ALL = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


def built(degrees: dict[str, int], reshard: str | int = "default", flavor: str = "plain"):
    config = config_of(degrees, flavor, parallelism={"fsdp_reshard_after_forward": reshard})
    return build_model(load_family("tests.tiny", flavor), config, mesh_of(degrees), CPU), config


# ------------------------------------------------------------------------------------------------- gathers and reductions


def step_collectives(degrees: dict[str, int], reshard: str | int) -> Counter[str]:
    model, config = built(degrees, reshard)
    batch = first_microbatch(config, mesh_of(degrees))
    summed_loss(model, batch).backward()  # the first use is not counted
    with Sent() as sent:
        summed_loss(model, batch).backward()
    return sent.kinds()


@pytest.mark.parametrize(
    ("reshard", "gathers"),
    # 4 units: embedding, two blocks, head; freed ones are gathered again for the backward pass, except the embedding
    [("never", 4), ("default", 4 + 2), ("always", 4 + 3)],
)
def test_parameters_are_gathered_as_often_as_the_policy_says_and_gradients_reduced_once(pools, reshard, gathers):
    counts = pools[4].run(f"{HERE}:step_collectives", degrees={"dp_shard": 4}, reshard=reshard)[0]
    assert counts == {"all-gather": gathers, "reduce-scatter": 4}


def prefetched(depth: int, degrees: dict[str, int], family: tuple[str, str] = ("tests.tiny", "deep")) -> list[tuple[int, int]]:
    """How many units the model, its embedding and blocks gather ahead, in the forward and in the backward pass."""
    model_of = {"name": family[0], "flavor": family[1]}
    config = config_of(degrees, model=model_of, parallelism={"fsdp_prefetch": depth})
    model = build_model(load_family(*family), config, mesh_of(degrees), CPU)
    states = [unit._get_fsdp_state() for unit in (model, model.embed, *model.layers.values())]
    return [(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)) for state in states]


def test_blocks_gather_as_far_ahead_as_configured(pools):
    """An MTP module, which calls the embedding again, gathered the first blocks for nobody."""
    shards = {"dp_shard": 2}
    expected = [(3, 0), (0, 0), (2, 0), (2, 1), (1, 2), (0, 2)]
    assert pools[2].run(f"{HERE}:prefetched", depth=2, degrees=shards)[0] == expected
    assert pools[2].run(f"{HERE}:prefetched", depth=1, degrees=shards)[0] == [(0, 0)] * 6  # FSDP2's implicit prefetch


def test_each_block_gathers_the_next_before_the_host_waits_for_routing(pools):
    units = 2 if BEFORE_2_13 else 1  # a block with experts is one unit, or two if experts need their own mesh
    wanted = [(1 + units, 0), (0, 0), (units, 0), (0, 0)]
    moe = ("tests.tiny_moe", "plain")
    assert pools[2].run(f"{HERE}:prefetched", depth=1, degrees={"dp_shard": 2, "ep": 2}, family=moe)[0] == wanted


def over_replicas(degrees: dict[str, int], config: Config) -> int:
    """The number of all-reduces over replicas in a step."""
    mesh = mesh_of(degrees)
    model = build_model(load_family(config.model.name, config.model.flavor), config, mesh, CPU)
    with Sent() as sent:
        forward_backward(model, next(rank_batches(config, mesh)), mesh)
    return sent.calls["all-reduce", tuple(dist.get_process_group_ranks(mesh.get_group("dp_replicate")))]


def test_replicas_reduce_once_a_step_with_split_experts_too(pools):
    """PyTorch 2.11 has units of experts inside of blocks, which reduced after every microbatch."""
    degrees = {"dp_replicate": 2, "dp_shard": 2, "ep": 2}
    config = config_of(degrees, accumulation=2, model={"name": "tests.tiny_moe"})
    counts = pools[4].run(f"{HERE}:over_replicas", degrees=degrees, config=config)
    assert counts == [1 + 2 + 2 * 2] * 4  # the labels; embedding and head; of each block the experts and the rest


@pytest.mark.parametrize(("reduced", "kept", "waits"), [
    ("float32", "float32", True), ("float32", "bfloat16", True), ("bfloat16", "bfloat16", True), ("bfloat16", "float32", False),
])  # fmt: skip
def test_replicas_reduce_after_the_last_microbatch_unless_the_sum_would_lose_precision(reduced, kept, waits):
    config = config_of({}, training={"mixed_precision_reduce": reduced, "dtype": kept})
    assert GradientSync.of(config) == (False, waits)


def one_matrix_a_microbatch(degrees: dict[str, int], config: Config) -> Any:
    """Trains a model whose two feed-forward layers use one of two matrices of equal shape in each microbatch."""
    calls = itertools.count()

    def forward(ffn: SwiGLU, x: Tensor) -> Tensor:
        return ffn.w2((ffn.w1, ffn.w3)[next(calls) // 2 % 2](x))

    with mock.patch.object(SwiGLU, "forward", forward):
        return trajectory(degrees, config)


def one_block_more(degrees: dict[str, int], config: Config, at: int) -> Any:
    """Trains a model whose second block is called in one of a step's two microbatches only."""
    calls = itertools.count()

    def forward(model: Any, x: Tensor, seq: SeqInfo) -> Tensor:
        c, x, seq = model.config, model.embed(x), with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in [*model.layers.values()][: 1 + (next(calls) % 2 == at)]:
            x = layer(x, rope, seq)
        return x

    with mock.patch.object(tiny.Model, "forward", forward):
        return trajectory(degrees, config)


REPLICAS, AT_END = {"dp_replicate": 2}, {"reduce_every_microbatch": False}


@pytest.mark.parametrize(("function", "more", "refusal"), [
    ("one_matrix_a_microbatch", {}, r"gradients for 24,704 of the 30,848 trained values of Block.* = false"),
    ("one_block_more", {"at": 0}, "last microbatch has no gradients for a Block, and an earlier one has.* = false"),
    ("one_block_more", {"at": 1}, None),
])  # fmt: skip
def test_replicas_add_the_gradients_of_a_step_where_microbatches_reach_other_parameters_or_refuse(
    pools, function, more, refusal
):
    """They added gradients of different parameters of equal size, and those of a block to the next step's. What the refusal
    recommends failed where a parameter had its first gradient in the last microbatch, or none yet.
    """

    def run(degrees, **parallelism):
        precision = {"mixed_precision_param": "bfloat16", "steps": 2}
        config = config_of(degrees, accumulation=2, training=precision, parallelism=parallelism)
        return pools[2].run(f"{HERE}:{function}", degrees=degrees, config=config, **more)[0][0]

    expected = run(SHARD)
    if refusal:
        with pytest.raises(WorkerFailure, match=refusal):
            run(REPLICAS)
    else:
        assert compare(run(REPLICAS), expected).excessive == []
    assert compare(run(REPLICAS, **AT_END), expected).excessive == []


def head_collectives(degrees: dict[str, int], chunks: int) -> Counter[str]:
    model, config = built(degrees)
    batch = first_microbatch(config, mesh_of(degrees))
    labels = batch.labels()
    ranks = degrees.get("tp", 1)
    hidden = torch.randn(labels.shape[0], labels.shape[1] // ranks, 64, requires_grad=True)
    model.head.sizes = Sizes(math.ceil(labels.numel() / chunks) * math.ceil(model.head.vocab_size / ranks), 2**21)
    summed_loss(model, batch).backward()
    with Sent() as sent:
        model.head(hidden, labels).backward()
    return sent.kinds()


def test_the_heads_weight_is_gathered_and_its_gradient_reduced_once_for_all_chunks(pools):
    counts = pools[2].run(f"{HERE}:head_collectives", degrees=SHARD, chunks=4)[0]
    assert counts == {"all-gather": 1, "reduce-scatter": 1}


def test_tensor_parallelism_costs_the_head_one_small_collective_per_chunk(pools):
    counts = pools[4].run(f"{HERE}:head_collectives", degrees=BOTH, chunks=4)[0]
    # FSDP's and the sequence's gather, and one a chunk; the reductions of both; the norm's weight over tp
    assert counts == {"all-gather": 2 + 4, "reduce-scatter": 2, "all-reduce": 1}


# ----------------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The most values in any plain tensor allocated while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        out = function(*args, **(kwargs or {}))
        known = {given.untyped_storage()._cdata for given in args if type(given) in (Tensor, nn.Parameter)}
        if type(out) is Tensor and out.device.type != "meta" and out.untyped_storage()._cdata not in known:
            self.numbers = max(self.numbers, out.numel())
        return out


def largest_while_building(degrees: dict[str, int]) -> tuple[int, int, int]:
    with Largest() as largest:
        model, _ = built(degrees)
    whole = max(parameter.numel() for parameter in model.parameters())
    return largest.numbers, whole, local_numbers(model)


def test_no_rank_ever_holds_more_than_its_share_while_the_model_is_built(pools):
    for largest, largest_parameter, local in pools[4].run(f"{HERE}:largest_while_building", degrees=BOTH):
        # 2 ** 14 is the table of the normal distribution; the largest parameter has 512 x 64 numbers, a quarter is 8,192
        assert largest <= 2**14 + 1 < largest_parameter
        assert local == pytest.approx((512 * 64 * 2 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)) / 4, rel=0.02)


def whole_logits(degrees: dict[str, int], flavor: str) -> Tensor:
    """Logits of a batch; every rank returns all of them."""
    model, _ = built(degrees, flavor=flavor)
    tokens = torch.arange(2 * 32).view(2, 32)
    model.head.sizes = Sizes(2**20, 2**21)
    return model.head(model(tokens, SeqInfo(torch.arange(32).expand(2, 32)))).detach()


@pytest.mark.parametrize("flavor", ["tied", "uneven"])
def test_without_labels_every_mesh_returns_all_logits(pools, flavor):
    reference = pools[1].run(f"{HERE}:whole_logits", degrees={}, flavor=flavor)[0]
    for found in pools[4].run(f"{HERE}:whole_logits", degrees=BOTH, flavor=flavor):
        assert found.shape == reference.shape
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- wrong tables


def with_table(change: dict[str, str | None]) -> Family:
    config = tiny.FLAVORS["plain"]
    table = {key: style for key, style in {**tiny.sharding(config), **change}.items() if style}
    return Family(SimpleNamespace(**vars(tiny) | {"sharding": lambda _: table}), config)


@pytest.mark.parametrize(
    ("change", "tp", "fault"),
    [
        ({"head.norm": None}, 1, "sharding: no pattern matches head.norm"),
        ({"layers.*.ffn.w2": None}, 2, "sharding: no pattern matches layers.*.ffn.w2"),
        ({"layers.*.ffn.w4": "row"}, 1, "sharding: the pattern 'layers.*.ffn.w4' matches nothing"),
        ({"layers.*.ffn.w2": "rows"}, 1, "sharding: layers.*.ffn.w2 has the unknown style 'rows'; there are: column"),
        ({}, 5, "parallelism.tensor_parallel_degree = 5: does not divide layers.*.attention.wq.weight, 64 rows"),
        ({}, 30, "parallelism.tensor_parallel_degree = 30: leaves ranks without one of the 512 rows of embed.weight"),
    ],
)
def test_a_wrong_sharding_table_is_refused_with_the_module_named_once(change, tp, fault):
    family = with_table(change)
    faults = sharding_faults(family.on_meta(), family, tp)
    assert [found for found in faults if found.startswith(fault)], faults
    assert len(faults) == len(set(faults))


def test_a_block_that_is_in_layers_twice_is_refused():
    family = with_table({})
    model = family.on_meta()
    model.layers["1"] = model.layers["0"]
    (fault,) = sharding_faults(model, family, 1)
    assert fault.startswith("layers.1 is an earlier block again")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_constructor_on_a_parameter_is_refused(register):
    """It was lost on every mesh, also on one process, where the parameter gets its memory."""
    family = with_table({})
    model = family.on_meta()
    getattr(model.embed.weight, register)(lambda _: None)
    (fault,) = sharding_faults(model, family, 1)
    assert fault.startswith("embed.weight has a hook of its constructor")


def build_with_table(change: dict[str, str | None]) -> None:
    family = with_table(change)
    mesh = mesh_of(TP)
    model = build_model(family, config_of(TP), mesh, CPU)
    summed_loss(model, first_microbatch(config_of(TP), mesh))
    dist.barrier()


@pytest.mark.parametrize("degrees", [SHARD, TP], ids=str)
def test_parameters_that_a_constructor_ties_stay_one_on_every_mesh(pools, degrees):
    def configured(mesh):
        return config_of(mesh, training={"steps": 2}, model={"name": "tests.forks.tied_in_constructor"})

    found, alone = as_one_process(pools, degrees, configured)
    assert found.weights.keys() == alone.weights.keys()
    assert {name for name in alone.weights if name.endswith(("output.weight", "w3.weight"))} == set()


def test_attributes_of_a_fork_and_an_optimizer_remain_what_their_author_has_set(pools):
    """FSDP deleted `model.shared`, and an EMA replaced `optimizer.ema`."""
    name = "tests.forks.plain_names"

    def configured(mesh):
        return config_of(
            *(mesh, "plain"), training={"steps": 2}, model={"name": name}, optimizer={"name": f"{name}:Named", "ema_decay": 0.9}
        )

    found, alone = as_one_process(pools, SHARD, configured)
    assert found.weights.keys() == alone.weights.keys() and "shared.wq.weight" in alone.weights


def test_tied_parameters_of_parts_that_no_unit_or_style_joins_are_refused():
    family = load_family("tests.tiny", "plain")
    model = family.on_meta()
    first, second = model.layers.values()
    second.attention.wk.weight = first.attention.wk.weight
    first.ffn.w2.weight = first.ffn.w1.weight
    two_styles, apart = sharding_faults(model, family, 1)
    assert apart == (
        "layers.1.attention.wk.weight and layers.0.attention.wk.weight are one parameter, and parts of the model that FSDP "
        "gathers at different times; let these parts share its module"
    )
    assert two_styles.endswith("are one parameter, which 'row' and 'column' split differently")
    second.attention = first.attention
    first.ffn.w2.weight = torch.nn.Parameter(first.ffn.w2.weight)
    assert sharding_faults(model, family, 1) == []


def test_a_column_module_that_does_not_get_the_whole_sequence_is_named(pools):
    with pytest.raises(WorkerFailure, match=r"sharding: layers.0.ffn.w1 is 'column' and must read what a 'sequence' module"):
        pools[2].run(f"{HERE}:build_with_table", change={"layers.*.ffn_norm": "replicate"})


# ---------------------------------------------------------------------------------------------------------- frozen weights


def trained_names(degrees: dict[str, int]) -> set[str]:
    """The parameters of a model with a frozen part that have a gradient after a step's backward pass."""
    mesh, family = mesh_of(degrees), load_family("tests.tiny_odd", "frozen")
    config = config_of(degrees, "frozen", model={"name": "tests.tiny_odd"})
    model = build_model(family, config, mesh, CPU)
    forward_backward(model, next(rank_batches(config, mesh)), mesh)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return {name for name, p in model.named_parameters() if p.grad is not None}


def test_parameters_that_a_model_freezes_are_frozen_on_a_mesh(pools):
    for names in pools[4].run(f"{HERE}:trained_names", degrees=BOTH):
        assert "layers.0.ffn.w3.weight" in names
        assert not [name for name in names if name.endswith("ffn.w1.weight")]


# ---------------------------------------------------------------------------------------------------------- initial weights


def _wave(index: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    return (sum(place * (axis + 1) for axis, place in enumerate(index)).double() / shape[0]).sin().exp()


def initial(config: tiny.Config) -> dict[str, object]:
    return {
        "embed.weight": Uniform(-0.3, 0.5),
        "layers.*.attention.w[qo].weight": Identity(0.7),
        "layers.*.attention.w[kv].weight": Computed(_wave),
        "layers.*.ffn.w1.weight": Uniform(0.1, 0.3),
        "layers.*.ffn.w[23].weight": Computed(_wave),
        "head.output.weight": Normal(0.02),
        "*norm.weight": Computed(_wave),
    }


def weights(degrees: dict[str, int], flavor: str) -> dict[str, Tensor]:
    family = Family(SimpleNamespace(**vars(tiny) | {"initial": initial}), tiny.FLAVORS[flavor])
    model = build_model(family, config_of(degrees, flavor), mesh_of(degrees), CPU)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("degrees", "flavor"),
    [
        ({"dp_shard": 2}, "plain"),
        ({"dp_shard": 2, "tp": 2}, "uneven"),
    ],
    ids=str,
)
def test_every_distribution_gives_a_mesh_the_weights_of_one_process_bit_for_bit(pools, degrees, flavor):
    expected = pools[1].run(f"{HERE}:weights", degrees={}, flavor=flavor)[0]
    assert all(weight.std() > 0.01 for weight in expected.values())
    for found in pools[math.prod(degrees.values())].run(f"{HERE}:weights", degrees=degrees, flavor=flavor):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
