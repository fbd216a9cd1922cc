"""Expert balance on one process: losses and gradients compared with plain autograd, biases, reports, faults."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from models.attention import SeqInfo
from models.moe import Experts, MoE, Router, RouterLosses
from tests.distributed.scenarios import config_of
from titanlite.config.read import Faults
from titanlite.loop.checks import check
from titanlite.optim import balance
from titanlite.registry.family import load_family

pytestmark = pytest.mark.usefixtures("group_of_file")  # counts are summed over all ranks
DIM, EXPERTS, TOP_K, ROWS, LENGTH = 12, 6, 2, 3, 7


def mixture(score: str = "softmax", bias: bool = False) -> MoE:
    torch.manual_seed(0)
    layer = MoE(Router(DIM, EXPERTS, TOP_K, score, bias=bias), Experts(EXPERTS, DIM, 8))
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.normal_(std=0.5)
    return layer


def start_counting(layer: MoE, speed: float = 0.0) -> Router:
    router = layer.router
    router.counts = torch.zeros(EXPERTS, dtype=torch.int64)
    router.bias_update_speed = speed
    layer.titanlite_routers = [router]
    return router


def by_hand(router: Router, x: torch.Tensor, losses: RouterLosses) -> torch.Tensor:
    """The two losses, sequence by sequence and token by token, as in the papers."""
    total = torch.zeros(())
    for sequence in x:
        frequency, probability = torch.zeros(EXPERTS), torch.zeros(EXPERTS)
        for token in sequence:
            logits = router.weight @ token
            scores = logits.softmax(0) if router.score == "softmax" else logits.sigmoid()
            total = total + losses.z * logits.exp().sum().log() ** 2
            frequency[scores.argsort(descending=True)[:TOP_K]] += EXPERTS / (TOP_K * LENGTH)
            probability = probability + scores / scores.sum() / LENGTH
        total = total + losses.balance * (frequency * probability).sum()
    return total


@pytest.mark.parametrize(("score", "balance", "z"), [("sigmoid", 0.7, 0.0), ("softmax", 0.0, 0.2), ("softmax", 0.7, 0.2)])
def test_the_gradients_are_those_of_the_loss_and_the_routers_losses_together(score, balance, z):
    losses = RouterLosses(balance, z, 1, "")
    layer, x, gradients = mixture(score), torch.randn(ROWS, LENGTH, DIM, requires_grad=True), torch.randn(ROWS, LENGTH, DIM)
    inputs = [x, *layer.parameters()]
    plain = layer(x)
    expected = torch.autograd.grad((plain * gradients).sum() + by_hand(layer.router, x, losses), inputs)
    layer.router.losses = losses
    found = layer(x)
    assert torch.equal(found, plain)  # the reported loss does not change
    for ours, theirs in zip(torch.autograd.grad((found * gradients).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_counts_each_row_as_often_as_it_is_computed_and_passes_without_gradient_not_at_all(recompute):
    """In looped models, a router runs twice in a pass: only the last run had counted."""
    layer = mixture()

    def looped(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x))

    router = start_counting(layer)
    balance.begin_step(layer)
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in range(3):
        x = torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        with torch.no_grad():
            for given in (x, layer(x)):
                expected += (1 + recompute) * F.one_hot(router(given)[1], EXPERTS).sum((0, 1))
        result = torch.utils.checkpoint.checkpoint(looped, x, use_reentrant=False) if recompute else looped(x)
        result.sum().backward()
        with torch.no_grad():
            layer(torch.randn(ROWS, LENGTH, DIM))  # as validation does
    assert torch.equal(router.counts, expected) and expected.sum() == 6 * (1 + recompute) * ROWS * LENGTH * TOP_K


def test_a_bias_rises_for_experts_below_the_mean_falls_above_it_and_does_not_move_on_a_skipped_step():
    layer = mixture(bias=True)
    router = start_counting(layer, speed=0.25)
    before = router.bias.clone()
    router.counts.copy_(torch.tensor([0, 4, 5, 6, 3, 6]))  # the mean is 4
    balance.move_biases(layer, skipped=torch.tensor(1.0))
    assert torch.equal(router.bias, before)
    balance.move_biases(layer, skipped=torch.tensor(0.0))
    assert torch.equal(router.bias, before + torch.tensor([0.25, 0, -0.25, -0.25, 0.25, -0.25]))


def test_reports_have_the_load_imbalance():
    layer = mixture(bias=True)
    router = start_counting(layer)
    router.counts.copy_(torch.tensor([0, 2, 2, 2, 2, 4]))
    router.bias.copy_(torch.tensor([0.0, -0.5, 0.25, 0, 0, 0]))
    values = balance.load(layer, expert_ranks=2)
    shares = [1 / 6] * 4 + [1 / 3]
    assert values == {
        "expert_load/0": pytest.approx(2.0),
        "expert_load": pytest.approx(2.0),
        "expert_entropy": pytest.approx(-sum(share * math.log(share) for share in shares) / math.log(EXPERTS)),
        "dead_experts": 1,
        "expert_rank_load": pytest.approx(4 / 3),
        "router_bias_range": pytest.approx(0.75),
    }
    assert balance.load(torch.nn.Linear(2, 2), 1) == {}
    router.counts = torch.tensor([6])  # an MoE layer with one expert
    assert balance.load(layer, 1)["expert_entropy"] == 1.0


def test_a_forks_own_moe_layers_are_counted_and_may_have_a_bias_in_some_layers():
    """Only MoE called `count`: with another layer around a Router, no bias moved, and reports showed a load of 0. Where some
    routers had a bias and others none, the report stopped the run."""
    family = load_family("tests.forks.own_names", "plain")
    model, config = family.module.Model(family.config), config_of({}, moe={"bias_update_speed": 0.5})
    mesh = init_device_mesh("cpu", (1,))
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor, 0.0)
    balance.balance_experts(model, config, 1, mesh, mesh)
    balance.begin_step(model)
    model(torch.zeros(1, 6, dtype=torch.int64), SeqInfo(torch.arange(6)[None]))
    balance.move_biases(model, torch.tensor(0.0))
    values = balance.load(model, 1)
    assert (values["expert_load/0"], values["expert_load/1"], values["router_bias_range"]) == (4.0, 4.0, 1.0)


@pytest.mark.parametrize(
    ("model", "key", "precision", "word"),
    [
        ("tests.tiny", "balance_loss", "bfloat16", "moe.balance_loss = 0.1: tests.tiny plain has no Router of models/moe.py"),
        ("tests.tiny_moe", "bias_update_speed", "bfloat16", "the routers of tests.tiny_moe plain have no bias; set it to 0"),
        ("tests.tiny_moe", "router_z_loss", "float16", "float16.* scales the loss, and this"),
    ],
)
def test_keys_without_effect_on_a_model_are_refused(model, key, precision, word):
    config = config_of({}, model={"name": model}, moe={key: 0.1}, training={"mixed_precision_param": precision})
    with pytest.raises(Faults, match=word):
        check(config, "some.toml", 1, open_files=False)
