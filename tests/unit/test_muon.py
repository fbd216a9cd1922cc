"""Muon in one process: compared with PyTorch's, with the closed form of its orthogonalization, and its split with AdamW."""

import math

import pytest
import torch
from torch import nn

from tests.unit.test_optimizer import model_of, set_gradients
from titanlite.config.schema import Optimizer as Keys
from titanlite.optim.build import build_optimizer, model_faults, set_lr
from titanlite.optim.muon import orthogonalized
from titanlite.optim.state import named_state
from titanlite.registry.family import load_family

_KEYS = Keys(name="Muon", implementation="for-loop", lr=1e-2, weight_decay=0.3, eps=1e-6, beta1=0.8, beta2=0.9)


def _matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """What Muon takes: AdamW takes all other parameters."""
    return {name: p for name, p in model.named_parameters() if name.startswith("layers.") and "norm" not in name}


def _polynomial(value: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


# ----------------------------------------------------------------------------------------------------- orthogonalization


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30), (1, 40), (40, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_orthogonalization_is_the_polynomial_of_the_singular_values(shape, steps):
    torch.manual_seed(0)
    stack = torch.randn(3, *shape) * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1)  # each has a norm of its own
    for matrix, found in zip(stack, orthogonalized(stack, steps), strict=True):
        u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        expected = u @ torch.diag(_polynomial(s / s.norm(), steps)) @ v
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)


# ------------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_those_of_pytorchs_muon_and_adamw(nesterov):
    keys = _KEYS.model_copy(update={"nesterov": nesterov, "momentum": 0.9, "ns_steps": 4})
    ours, theirs = model_of(), model_of()
    optimizer = build_optimizer(ours, keys, torch.bfloat16)  # as in PyTorch's Muon
    rest = [(name, p) for name, p in theirs.named_parameters() if name not in _matrices(theirs)]
    references = [
        torch.optim.Muon(
            _matrices(theirs).values(), weight_decay=0.3, momentum=0.9, nesterov=nesterov, ns_steps=4,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW([p for _, p in rest if p.ndim == 2], weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6),
        torch.optim.AdamW([p for _, p in rest if p.ndim < 2], weight_decay=0.0, betas=(0.8, 0.9), eps=1e-6),
    ]  # fmt: skip
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for step in range(4):
        for model, each in ((ours, [optimizer]), (theirs, references)):
            set_gradients(model, step)
            for one in each:
                set_lr(one, 1e-2 / (step + 1))
                one.step()
    expected = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        moved, wanted = p.detach() - before[name], expected[name].detach() - before[name]
        distance = ((moved - wanted).norm() / wanted.norm()).item()
        assert distance < (2e-2 if name in _matrices(ours) else 1e-5), name  # both orthogonalize in bfloat16


class _Experts(nn.Module):
    """One stack, or its matrices as separate parameters."""

    def __init__(self, stack: torch.Tensor, apart: bool):
        super().__init__()
        parts = {f"w{index}": matrix for index, matrix in enumerate(stack)} if apart else {"w": stack}
        experts = nn.ParameterDict({name: nn.Parameter(part.clone()) for name, part in parts.items()})
        self.layers = nn.ModuleDict({"0": nn.ModuleDict({"experts": experts})})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_a_stack_are_those_of_its_matrices(dtype):
    torch.manual_seed(0)
    first = torch.randn(9, 4, 6)  # more matrices than rows or columns, since the rate depends on rows and columns
    # stochastic rounding would draw other bits for another name
    keys = _KEYS.model_copy(update={"rounding": "compensated"})
    stack, matrices = _Experts(first, False).to(dtype), _Experts(first, True).to(dtype)
    optimizers = [build_optimizer(model, keys) for model in (stack, matrices)]
    (together,) = stack.parameters()
    start = together.detach().float().clone()
    for _ in range(3):
        together.grad = torch.randn(9, 4, 6).to(dtype)
        for matrix, grad in zip(matrices.parameters(), together.grad, strict=True):
            matrix.grad = grad
        for optimizer in optimizers:
            set_lr(optimizer, 1e-1)
            optimizer.step()
    expected = torch.stack([matrix.detach() for matrix in matrices.parameters()]).float() - start
    torch.testing.assert_close(
        together.detach().float() - start, expected, rtol=1e-2, atol=1e-4 if dtype == torch.float32 else 1e-2
    )


# ---------------------------------------------------------------------------------------------------------- as an optimizer


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, "stochastic"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "compensated")],
    ids=str,
)
def test_a_step_that_is_not_finite_changes_nothing_and_gradients_are_scaled(dtype, rounding):
    """In bfloat16, also those of Bfloat16Adam, which has the rest of the parameters."""
    keys = _KEYS.model_copy(update={"implementation": "fused", "rounding": rounding})
    found = []
    for scale in (1.0, 4.0):
        model = model_of().to(dtype)
        optimizer = build_optimizer(model, keys, compiler=lambda kernel: kernel)  # a test of ranks compiles them
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        set_gradients(model, 1, scale)
        optimizer.step()
        before = [t.detach().clone() for t in (*model.parameters(), *named_state(optimizer, model).values())]
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        after = [*model.parameters(), *named_state(optimizer, model).values()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        found.append(before)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_without_matrices_is_refused():
    (fault,) = model_faults(_KEYS, nn.Linear(3, 3))
    assert fault.startswith("optimizer.name")


def test_experts_and_routers_of_other_names_are_refused():
    """Experts would be left to AdamW, and a router would be orthogonalized with another factor of muP."""
    found = list(model_faults(_KEYS, load_family("tests.forks.own_names", "plain").on_meta()))
    assert [fault.partition(", but ")[2] for fault in found] == [
        "layers.0.ffn.bank has another; rename it",
        "layers.0.ffn.gate has another; rename it",
    ]
