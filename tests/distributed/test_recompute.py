"""The inputs of compiled blocks, and how much each mode of activation checkpointing keeps. test_cover.py compares gradients."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import profile

from benchmarks.recompute import kept_bytes
from models import llama3
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, GLOBAL_BATCH, MODES, config_of, first_microbatch, mesh_of
from titanlite.ground.torch_private import BEFORE_2_13, set_memory_budget
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model
from titanlite.registry.family import Family, family_of, load_family

HERE = "tests.distributed.test_recompute"


# ------------------------------------------------------------------------------------------- what enters a compiled block


def types_at_compiled_parts() -> tuple[set[str], float]:
    """(types of the tensors that blocks and head are given, norm of the embedding's gradient)."""
    degrees = {"tp": 2}
    config = config_of(degrees, compile={"enable": True, "backend": "aot_eager"})
    mesh = mesh_of(degrees)
    model = build_model(load_family("tests.tiny", "plain"), config, mesh, CPU)
    seen: set[str] = set()
    for part in (*model.layers.values(), model.head):
        part.register_forward_pre_hook(lambda _, args: seen.add(type(args[0]).__name__))
    summed_loss(model, first_microbatch(config, mesh)).backward()
    return seen, model.embed.weight.grad.full_tensor().norm().item()


def test_no_asynchronous_tensor_enters_a_compiled_block_and_the_embedding_has_its_gradient(pools):
    # an AsyncCollectiveTensor there gives the embedding a zero gradient, although the loss is correct
    for seen, norm in pools[2].run(f"{HERE}:types_at_compiled_parts"):
        assert seen == {"Tensor"}
        assert norm > 0.01


# ----------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(
    mode: dict[str, object], backend: str | None, keep: bool = False, name: str = "tests.tiny", flavor: str = "deep"
) -> tuple[int, int]:
    """(bytes that the blocks keep between forward and backward pass, compiled graphs)."""
    compiler = {"enable": backend is not None, "backend": backend or "eager"}
    config = config_of({}, model={"name": name, "flavor": flavor}, activation_checkpoint=mode, compile=compiler)
    torch._dynamo.reset()
    counters.clear()
    family = load_family(name, flavor)
    if keep:
        family = Family(SimpleNamespace(**vars(family.module), KEEP=(torch.ops.aten.silu.default,)), family.config)
    model = build_model(family, config, mesh_of({}), CPU)
    return kept_bytes(model, first_microbatch(config, mesh_of({})).inputs()), counters["stats"]["unique_graphs"]


@functools.cache
def _measured(pool: Pool) -> dict[str, int]:
    plain = {mode: (MODES[mode], None) for mode in ("none", "full", "every second layer", "per operation")}
    compiled = {f"{mode}, compiled": (MODES[mode], "aot_eager") for mode in ("none", "full", "per operation")}
    budgets = {f"budget {share}": ({"mode": "memory_budget", "memory_budget": share}, "aot_eager") for share in (0.0, 0.3, 1.0)}
    measured = {}
    for name, (keys, backend) in (plain | compiled | budgets).items():
        measured[name], graphs = pool.run(f"{HERE}:saved_bytes", mode=keys, backend=backend)[0]
        assert (graphs > 0) == (backend is not None)
    return measured


def test_the_more_a_mode_recomputes_the_less_it_keeps(pools):
    kept = _measured(pools[1])
    print({mode: f"{size / kept['none']:.2f}" for mode, size in kept.items()})
    assert kept["full"] < kept["every second layer"] < kept["none"]
    assert kept["full"] < kept["per operation"] < 0.75 * kept["none"]
    assert kept["full, compiled"] < kept["per operation, compiled"] < 0.75 * kept["none, compiled"]
    assert kept["budget 0.0"] < kept["budget 0.3"] < kept["budget 1.0"] < kept["none"]


def test_every_second_matrix_product_of_a_block_is_kept(pools):
    kept = _measured(pools[1])
    products = 4 * GLOBAL_BATCH * 32 * (64 + 32 + 96 + 64) * 4  # layers x sequences x tokens x (wq, wv, w1, w2) x bytes
    assert kept["per operation"] - kept["full"] >= products


def test_matmuls_with_a_bias_are_kept_like_others(pools):
    """Of Qwen 2, the projections of queries, keys and values were all recomputed."""
    model = {"name": "tests.tiny_qwen3", "flavor": "biased"}
    modes = MODES["per operation"], MODES["full"]
    kept = [pools[1].run(f"{HERE}:saved_bytes", mode=mode, backend=None, **model)[0][0] for mode in modes]
    products = 2 * GLOBAL_BATCH * 32 * (128 + 64 + 96 + 64) * 4  # layers x sequences x tokens x (wq, wv, w1, w2) x bytes
    assert kept[0] - kept[1] >= products


def test_a_models_own_table_adds_to_what_is_kept(pools):
    without = _measured(pools[1])["per operation"]
    more, _ = pools[1].run(f"{HERE}:saved_bytes", mode=MODES["per operation"], backend=None, keep=True)[0]
    silu = 4 * GLOBAL_BATCH * 32 * 96 * 4  # layers x sequences x tokens x features x bytes
    assert more - without == silu


def of_shared_layers(keys: dict[str, object]) -> tuple[float, float]:
    """(loss, norm of a gradient) of a fork whose blocks have one feed-forward layer, in bfloat16."""

    class Model(llama3.Model):
        def __init__(self, config: llama3.Config):
            super().__init__(config)
            for layer in self.layers.values():
                layer.ffn = self.layers["0"].ffn

    config = config_of({}, training={"mixed_precision_param": "bfloat16"}, activation_checkpoint=keys)
    family = family_of(config.model)
    family = Family(SimpleNamespace(**{**vars(family.module), "Model": Model}), family.config)
    model = build_model(family, config, mesh_of({}), CPU)
    loss = summed_loss(model, first_microbatch(config, mesh_of({})))
    loss.backward()
    return loss.item(), model.layers["0"].ffn.w1.weight.grad.norm().item()


def test_a_feed_forward_layer_that_blocks_share_computes_in_parts(pools):
    """In one process, each block cast its parameters before the layer did."""
    whole, parts = (
        pools[1].run(f"{HERE}:of_shared_layers", keys={"mode": "full", "sequence_chunks": count})[0] for count in (1, 4)
    )
    assert parts == pytest.approx(whole, rel=0.01)  # in bfloat16


# ------------------------------------------------------------------------------------------------------- random numbers


def gradients_with_dropout(mode: str, backend: str = "aot_eager") -> dict[str, torch.Tensor]:
    """Gradients of a compiled model that draws random numbers in its blocks."""
    name, keys = "tests.tiny_block_dropout", {"enable": True, "backend": backend}
    config = config_of({}, model={"name": name}, activation_checkpoint=MODES[mode], compile=keys)
    torch._dynamo.reset()
    model = build_model(load_family(name, "plain"), config, mesh_of({}), CPU)
    torch.manual_seed(3)
    summed_loss(model, first_microbatch(config, mesh_of({}))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_recomputed_blocks_draw_the_dropout_of_their_forward_pass(pools):
    wanted, *found = (
        pools[1].run(f"{HERE}:gradients_with_dropout", mode=mode)[0]
        for mode in ("none", "full", "every second layer", "per operation")
    )
    for gradients in found:
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_blocks_that_inductor_recomputes_have_the_dropout_of_their_forward_pass(pools):
    wanted, found = (
        pools[1].run(f"{HERE}:gradients_with_dropout", mode=mode, backend="inductor")[0] for mode in ("none", "full")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def difference_with_dropout(budget: float) -> float:
    """The distance of a matrix's gradient from that implied by the forward pass, relative to its norm.

    For the sum of dropout(h) @ w.T, the gradient of w is the sum over tokens of dropout(h); times w.T, it is the sum of the
    results. One block, compiled by inductor.
    """
    torch._dynamo.reset()
    set_memory_budget(budget, ())
    torch.manual_seed(0)
    first, last = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
    block = torch.compile(lambda x: last(F.dropout(F.silu(first(x)), 0.5)))
    results = block(torch.randn(512, 32).requires_grad_())  # activations must be larger than weights, or nothing is recomputed
    results.sum().backward()
    set_memory_budget(1.0, ())
    assert last.weight.grad is not None
    expected = results.detach().sum(0)
    return float((last.weight @ last.weight.grad[0] - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_at_any_memory_budget_the_backward_pass_has_the_dropout_of_the_forward_pass(pools, budget):
    """With PyTorch's default choice of what to keep, the error is 0.25."""
    assert pools[1].run(f"{HERE}:difference_with_dropout", budget=budget)[0] < 1e-5


# ------------------------------------------------------------------------------------------------------ choices of experts


def calls_of_backward(backend: str | None) -> dict[str, int]:
    """How often the second backward pass, with experts on two ranks and full recomputation, runs the functions of routing."""
    degrees = {"dp_shard": 2, "ep": 2}
    keys = {"enable": backend is not None, "backend": backend or "eager"}
    config = config_of(degrees, model={"name": "tests.tiny_moe"}, activation_checkpoint=MODES["full"], compile=keys)
    torch._dynamo.reset()
    mesh = mesh_of(degrees)
    model = build_model(family_of(config.model), config, mesh, CPU)
    batch = first_microbatch(config, mesh)
    summed_loss(model, batch).backward()
    loss = summed_loss(model, batch)
    with profile() as seen:
        loss.backward()
    names = ("aten::topk", *(f"titanlite::{name}" for name in ("exchange_counts", "dispatch_experts", "combine_experts")))
    return {name: sum(event.name == name for event in seen.events()) for name in names}


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_recomputation_dispatches_tokens_again_but_does_not_route_count_or_combine(pools, backend):
    if backend and BEFORE_2_13:
        pytest.skip("compiled blocks with split experts need PyTorch 2.13")
    for calls in pools[2].run(f"{HERE}:calls_of_backward", backend=backend):
        assert list(calls.values()) == [0, 0, 2, 0], calls  # two layers
