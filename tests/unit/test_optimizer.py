"""The optimizer: which parameters decay, the step itself, its state for checkpoints, and gradient clipping."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import llama3
from titanlite.config.schema import Config
from titanlite.config.schema import Optimizer as Keys
from titanlite.optim import build
from titanlite.optim.build import _of_all_at_once, _row_by_row, build_optimizer, clip_gradients, set_lr
from titanlite.optim.state import named_state
from titanlite.transforms import compile

_CONFIG = llama3.Config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=24, vocab_size=32)


def model_of(seed: int = 0) -> nn.Module:
    model = llama3.Model(_CONFIG)
    torch.manual_seed(seed)
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn_like(p)


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _decayed(model: nn.Module, keys: Keys) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = build_optimizer(model, keys).param_groups
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert {group["weight_decay"] for group in groups} <= {0.0, keys.weight_decay}
    return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}


# ---------------------------------------------------------------------------------------------------------- weight decay


def test_decay_parameters_is_a_pattern_of_names():
    attention = {f"layers.0.attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
    assert _decayed(model_of(), Keys(decay_parameters=r"attention\.w")) == attention
    norms = {"layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "head.norm.weight"}
    assert _decayed(model_of(), Keys(decay_parameters="norm")) == norms
    assert _decayed(model_of(), Keys(decay_parameters="")) == _decayed(model_of(), Keys())


def test_all_parameters_or_none_may_decay():
    for model, count in ((nn.Linear(2, 2, bias=False), 1), (nn.LayerNorm(2), 0)):
        assert len(_decayed(model, Keys())) == count


# -------------------------------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_steps_and_state_are_those_of_pytorch_and_the_state_is_there_before_the_first_step(name, implementation):
    keys = Keys(name=name, implementation=implementation, lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    ours, theirs = model_of(), model_of()
    optimizer = build_optimizer(ours, keys)
    assert all((value == 0).all() for value in named_state(optimizer, ours).values())
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    reference = getattr(torch.optim, name)(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.9), eps=1e-6, foreach=implementation == "foreach", fused=implementation == "fused",
    )  # fmt: skip
    for step in range(5):
        for model, each in ((ours, optimizer), (theirs, reference)):
            set_gradients(model, step)
            set_lr(each, 1e-2 / (step + 1))
            each.step()
        assert all(map(torch.equal, _weights(ours), _weights(theirs)))
    state, expected = named_state(optimizer, ours), named_state(reference, theirs)
    assert {key: (value.dtype, value.shape, value.device) for key, value in state.items()} == {
        key: (value.dtype, value.shape, value.device) for key, value in expected.items()
    }
    assert all(torch.equal(state[key], value) for key, value in expected.items())


# ---------------------------------------------------------------------------------------------------------- the gradients


def _optimizer(parameters: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=fused)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_clipping_equals_pytorchs(group_of_one, scale, max_norm, fused):
    ours = model_of()
    set_gradients(ours, 3, scale)
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.grad = mine.grad.clone()
    optimizer = _optimizer(ours.parameters(), fused)
    norm = clip_gradients(optimizer, max_norm)
    optimizer.step()  # a fused one divides here
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(group_of_one, bad):
    model = model_of()
    set_gradients(model, 3)
    next(model.parameters()).grad[0, 0] = bad
    assert not clip_gradients(_optimizer(model.parameters()), 1.0).isfinite()


class _Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_norm_on_gpus_takes_as_many_operations_for_many_parameters_as_for_one():
    torch.manual_seed(0)
    shapes = [(8, 16), (5,), (0, 4), (2, 3, 4)] * 10
    tensors = [torch.randn(shape, dtype=[torch.float32, torch.bfloat16][n % 2]) for n, shape in enumerate(shapes)]
    expected = sum(tensor.double().square().sum() for tensor in tensors).item()
    for function in (_of_all_at_once, _row_by_row):
        assert function(tensors).item() == pytest.approx(expected, rel=1e-6)
    counts = []
    for number in (1, len(tensors)):
        with _Operations() as operations:
            _of_all_at_once(tensors[:number])
        counts.append(operations.count)
    assert counts[0] == counts[1]


# ------------------------------------------------------------------------------------------------- pairs of keys with precision

MUON, BFLOAT16 = {"optimizer.name": "Muon"}, {"training.dtype": "bfloat16"}


def _faults(keys: dict[str, Any]) -> list[str]:
    return list(build.faults(Config().with_keys(keys)))


PARAM, KERNEL = "training.mixed_precision_param", "optimizer.implementation"
REFUSED = [  # keys, the one that the fault names first, its remedy
    (BFLOAT16 | {PARAM: "float32"}, PARAM, {PARAM: "bfloat16"}),
    (BFLOAT16 | {PARAM: "float16"}, PARAM, {"training.dtype": "float32"}),
    (BFLOAT16 | {"lora.enable": True}, "training.dtype", {"training.dtype": "float32"}),
    (BFLOAT16 | {KERNEL: "foreach"}, KERNEL, {KERNEL: "for-loop"}),
    (MUON | {"lora.enable": True}, "optimizer.name", {"optimizer.name": "AdamW"}),
    (MUON | {"parallelism.cpu_offload": True}, "optimizer.name", {"parallelism.cpu_offload": False}),
]


@pytest.mark.parametrize(("wrong", "key", "remedy"), REFUSED)
def test_wrong_values_are_refused_by_name_and_correct_ones_pass(wrong, key, remedy):
    (fault,) = _faults(wrong)
    assert fault.startswith(f"{key} = ")
    assert _faults(wrong | remedy) == []


def test_the_compiled_kernel_needs_a_compiler_if_parameters_are_on_a_cpu(monkeypatch):
    monkeypatch.setattr(compile, "has_compiler", lambda: False)
    (fault,) = _faults(BFLOAT16)
    assert 'optimizer.implementation = "fused": with training.dtype = "bfloat16" its kernel is compiled' in fault
    assert _faults(BFLOAT16 | {"optimizer.implementation": "for-loop"}) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _faults(BFLOAT16) == []
    assert len(_faults(BFLOAT16 | {"parallelism.cpu_offload": True})) == 1
