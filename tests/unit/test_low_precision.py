"""Adam in bfloat16: on average it follows the papers, small updates included. test_muon.py skips and scales its steps."""

import math

import pytest
import torch
from torch import nn

from titanlite.config.schema import Optimizer as Keys
from titanlite.optim.adam_bf16 import Bfloat16Adam
from titanlite.optim.build import build_optimizer, set_lr
from titanlite.optim.rounding import joined
from titanlite.optim.state import named_state

ROUNDINGS = ("stochastic", "compensated")
DECAY = 0.1


def _model(*shape: int, value: float = 1.0) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full(shape, value, dtype=torch.bfloat16))
    return model


def _optimizer(model: nn.Module, **keys) -> torch.optim.Optimizer:
    return build_optimizer(model, Keys(**{"implementation": "for-loop", "weight_decay": 0.0, **keys}))


def _held(optimizer: Bfloat16Adam, model: nn.Module) -> torch.Tensor:
    """A parameter with its optimizer state."""
    return joined(model.weight.detach(), optimizer.state[model.weight].get("remainder"))


def _by_definition(name: str, value: float, gradients: list[float], lr: float, betas: tuple[float, float], eps: float):
    """Adam or AdamW as in its paper, in Python's floats: (parameter, first moment, second moment) at the end."""
    first = second = 0.0
    for step, gradient in enumerate(gradients, 1):
        if name == "AdamW":
            value -= lr * DECAY * value
        else:
            gradient += DECAY * value
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        value -= lr * first / (1 - betas[0] ** step) / (math.sqrt(second / (1 - betas[1] ** step)) + eps)
    return value, first, second


def _gradients(steps: int) -> list[float]:
    torch.manual_seed(1)
    return (torch.randn(steps) * 0.01 + 0.002).bfloat16().tolist()


# ------------------------------------------------------------------------------------------------------- against the paper


@pytest.mark.parametrize(
    ("name", "rounding", "beta2"),
    [("AdamW", "stochastic", 0.95), ("AdamW", "compensated", 0.999), ("Adam", "compensated", 0.95)],
)
def test_the_mean_over_many_values_follows_the_definition(name, rounding, beta2):
    """Each value draws its own random bits, so the mean is that of equally many runs."""
    gradients, lr = _gradients(200), 1e-3
    model = _model(200, 200, value=0.5)
    optimizer = _optimizer(model, name=name, lr=lr, beta2=beta2, rounding=rounding, weight_decay=DECAY, eps=1e-3)
    for gradient in gradients:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
    value, first, second = _by_definition(name, 0.5, gradients, lr, (0.9, beta2), 1e-3)
    state = optimizer.state[model.weight]
    moved = _held(optimizer, model).double().mean().item() - 0.5
    error = _held(optimizer, model).double().std().item() / math.sqrt(model.weight.numel())
    print(f"{rounding}, {beta2}: moved by {moved:.3e} with a standard error of {error:.0e}, expected {value - 0.5:.3e}")
    assert moved == pytest.approx(value - 0.5, abs=5 * error + 1e-3 * abs(value - 0.5))
    assert error < 0.15 * abs(value - 0.5)
    assert state["exp_avg"].double().mean().item() == pytest.approx(first, rel=2e-3)
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(second, rel=2e-3)


# ---------------------------------------------------------------------------------------------------------- as an optimizer


def test_random_bits_are_a_function_of_the_name_and_the_step():
    def moved(name: str, steps: int) -> torch.Tensor:
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.ones(50, 50, dtype=torch.bfloat16)))
        optimizer = _optimizer(model, lr=1e-3, eps=1e-30)
        for _ in range(steps):
            set_lr(optimizer, 1e-3 if _ == steps - 1 else 0.0)
            model.get_parameter(name).grad = torch.ones(50, 50, dtype=torch.bfloat16)
            optimizer.step()
        return model.get_parameter(name).detach()

    assert torch.equal(moved("one", 1), moved("one", 1))
    assert not torch.equal(moved("one", 1), moved("other", 1))
    assert not torch.equal(moved("one", 1), moved("one", 2))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_compiled_and_eager_values_are_equal_and_one_kernel_serves_all_shapes(rounding):
    shapes = [(37, 53), (64, 2048), (101,), (3, 4, 5), (300, 129), (1, 40), (8192,), (2, 3, 1024)]

    def trained(implementation: str) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes])
        optimizer = _optimizer(model, rounding=rounding, implementation=implementation, weight_decay=0.1)
        for _ in range(3):
            for p in model:
                p.grad = torch.randn(p.shape).bfloat16()
            optimizer.step()
        values = [*(p.detach() for p in model), *named_state(optimizer, model).values()]
        return values, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    (compiled, graphs), (eager, none) = trained("fused"), trained("for-loop")
    # rows of 1,024 values; rows of any length; a single row of any length
    assert (graphs, none) == (3, 0)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
