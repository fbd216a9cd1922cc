"""Linear layers in float8: what they compute, by their definition; which layers they are; what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import scenarios
from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.schema import Config
from titanlite.parallel import tensor
from titanlite.parallel.parallelize import STEPS
from titanlite.registry.check import Subject
from titanlite.registry.family import family_of
from titanlite.transforms import float8
from titanlite.transforms.float8 import convert, linear_layers
from titanlite.transforms.meta import on_meta

pytest.importorskip("torchao", reason="needs torchao")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF = {"seq_len": 32, "local_batch_size": 2, "mixed_precision_param": "bfloat16"}
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def config_of(keys: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return scenarios.config_of({}, float8={"enable": True, "emulate": True, **(keys or {})}, **sections)


def layer_of(recipe: str) -> nn.Linear:
    """A layer of a small model, with weights."""
    config = config_of({"recipe_name": recipe})
    model = on_meta(family_of(config.model), config)
    convert(model, config)
    layer = model.layers["0"].ffn.w1.to_empty(device="cpu")
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    return layer


@pytest.mark.parametrize("gathered", [False, True])
def test_layers_with_one_weight_have_one_after_the_conversion(gathered):
    """What is gathered in float8 is a new parameter of each layer, so that tied ones trained apart."""
    config = config_of({"enable_fsdp_float8_all_gather": gathered}, model={"name": "tests.forks.tied_in_constructor"})
    model = on_meta(family_of(config.model), config)
    before = dict(model.named_parameters())
    convert(model, config)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(layer.ffn.w3.weight is layer.ffn.w1.weight for layer in model.layers.values())


# ------------------------------------------------------------------------------------------------------- what they compute


def cast(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """x rounded to float8, in float32: scaled by the largest power of two for which its largest value, of all or along `dim`,
    fits float8, cast, and scaled back.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(kind).max / largest)))
    return (x * scale).clamp(torch.finfo(kind).min, torch.finfo(kind).max).to(kind).float() / scale


def by_definition(recipe: str, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of x (tokens, in) and weight (out, in), for the gradient `gradient` (tokens, out) of the output."""
    if recipe == "tensorwise":
        x8, w8, s8 = cast(x, E4M3, None), cast(weight, E4M3, None), cast(gradient, E5M2, None)
        return x8 @ w8.T, s8 @ w8, s8.T @ x8
    out = cast(x, E4M3, 1) @ cast(weight, E4M3, 1).T
    if recipe == "rowwise":
        return out, cast(gradient, E4M3, 1) @ cast(weight, E4M3, 0), cast(gradient, E4M3, 0).T @ cast(x, E4M3, 0)
    return out, cast(gradient, E4M3, 1) @ cast(weight, E4M3, None), gradient.T @ x


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_and_its_gradients_equal_the_definition(recipe):
    random = torch.Generator().manual_seed(1)
    layer = layer_of(recipe)
    x, gradient = torch.randn(48, 64, generator=random), torch.randn(48, 96, generator=random)
    x[3] *= 100  # one token that is unlike the others
    x.requires_grad_()
    out = layer(x)
    out.backward(gradient)
    found = out, x.grad, layer.weight.grad
    exact = x @ layer.weight.T, gradient @ layer.weight, gradient.T @ x
    defined = by_definition(recipe, x.detach(), layer.weight.detach(), gradient)
    for name, got, expected, unrounded in zip(("output", "input", "weight"), found, defined, exact, strict=True):
        assert (got - expected).norm() < 1e-6 * expected.norm(), name
        in_float8 = name != "weight" or recipe != "rowwise_with_gw_hp"
        assert ((got - unrounded).norm() > 1e-3 * unrounded.norm()) == in_float8, name


# ------------------------------------------------------------------------------------------------------------- which layers


def test_names_and_types_of_parameters_and_filtered_layers_do_not_change():
    config = config_of({"filter_fqns": ["layers.0.*", "*.w[kv]"]})
    family = family_of(config.model)
    model, plain = on_meta(family, config), on_meta(family, config)
    for each in (model, plain):
        each.layers["1"].ffn.w3 = each.layers["1"].ffn.w1  # a fork may share a layer
    convert(model, config)
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in plain.named_parameters()
    }
    every = model.named_modules(remove_duplicate=False)
    changed = {name for name, each in every if type(each) is not type(plain.get_submodule(name))}
    assert changed == {f"layers.1.{name}" for name in ("attention.wq", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3")}
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in changed)


def test_layers_of_odd_sizes_are_refused_by_name_once_for_all_layers():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.ModuleDict({"w": nn.Linear(64, 40), "v": nn.Linear(64, 32)}) for i in range(3)})
    (line,) = linear_layers(model, config_of(), {})[1]
    assert "layers.*.w is 64 x 40" in line and 'add "layers.*.w" to float8.filter_fqns' in line


def test_a_layer_of_a_block_that_a_fork_names_elsewhere_first_is_one_of_the_block():
    """As one attention of all blocks: it silently stayed in bfloat16."""
    model = nn.Module()
    model.shared = nn.Linear(64, 32)
    model.layers = nn.ModuleDict({name: nn.ModuleDict({"w": model.shared}) for name in "01"})
    split = config_of(parallelism={"tensor_parallel_degree": 4})
    found, (line,) = linear_layers(model, split, {"shared": "column"})
    assert found == {"layers.0.w": model.shared} and "layers.*.w is 64 x 8" in line


@pytest.mark.parametrize(("ranks", "faulty"), [(2, False), (4, False), (3, True)])
def test_unequal_shards_are_not_gathered_in_float8_on_any_rank(ranks, faulty):
    """gloo aborted with SIGABRT: each rank gathered as many bytes as it held."""
    config = config_of({"enable_fsdp_float8_all_gather": True})
    subject = Subject(config, ranks, None)
    subject.model = on_meta(family_of(config.model), config)
    found = [fault for step in STEPS if step.name == "FSDP2" for fault in step.faults(subject)]
    assert [f"{ranks} ranks do not divide the rows of layers.*.attention.wq" in each for each in found] == [True] * faulty


# ------------------------------------------------------------------------------------------------------------- what is refused

ALL_GATHER, RECIPE = "enable_fsdp_float8_all_gather", "recipe_name"
CHUNKED = {"activation_checkpoint": {"mode": "full", "sequence_chunks": 3}, "training": {"local_batch_size": 2}}
FAULTS = [
    ({"emulate": False}, {"training": HALF}, ["compute capability 8.9", "float8.emulate = true"]),
    ({}, {"training": HALF | {"mixed_precision_param": "float16"}}, ["float16"]),
    ({}, {"training": HALF | {"seq_len": 33, "local_batch_size": 1}}, ["training.seq_len = 33", "16"]),
    ({}, {"training": HALF | {"local_batch_size": 1}, "parallelism": {"context_parallel_degree": 4}},
     ["context_parallel_degree = 1 x 32 / 4 = 8: must be a multiple of 16"]),
    ({}, CHUNKED, ["activation_checkpoint.sequence_chunks = 3", "x 10 or 11 tokens of a part must"]),
    ({}, {"lora": {"enable": True}}, ["lora.enable = true"]),
    ({ALL_GATHER: True, RECIPE: "rowwise"}, {}, [f"{ALL_GATHER} = true", 'use "tensorwise"']),
    ({ALL_GATHER: True}, {"parallelism": {"tensor_parallel_degree": 2}}, [ALL_GATHER, "tensor_parallel_degree = 2"]),
    ({ALL_GATHER: True}, {"parallelism": {"cpu_offload": True}}, [ALL_GATHER, "cpu_offload"]),
    ({}, {"parallelism": {"tensor_parallel_degree": 4}},
     ["layers.*.attention.wk", "64 x 8 on each of parallelism.tensor_parallel_degree = 4 ranks", "layers.*.ffn.w1"]),
    ({"filter_fqns": ["a"]}, {}, ['"a" matches no linear layer']),
    ({}, {"training": {"seq_len": 48, "local_batch_size": 1, "predict_further": 1},
          "parallelism": {"tensor_parallel_degree": 2}},
     ["1 x 48 / 2 = 24: the tokens of further.*.projection on each rank must be a multiple of 16"]),
]  # fmt: skip


def faults(config: Config) -> list[str]:
    family = family_of(config.model)
    idle = effects.faults(config.idle(Hardware(torch.cuda.is_available())))
    return [*idle, *float8.faults(config), *tensor.faults(config, family, on_meta(family, config))]


@pytest.mark.parametrize(("keys", "sections", "expected"), FAULTS)
def test_unsupported_settings_are_refused_by_name(monkeypatch, keys, sections, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = "\n".join(faults(config_of(keys, **sections)))
    assert [part for part in expected if part not in found] == []
    assert faults(config_of()) == []


def test_a_gpu_that_supports_the_recipe_needs_no_emulation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert faults(config_of({"emulate": False}, training=HALF)) == []
    overlapped = {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}
    assert faults(config_of({"emulate": False}, training=HALF, parallelism=overlapped, compile={"enable": True})) == []
    (fault,) = faults(config_of({"emulate": False, "recipe_name": "rowwise"}, training=HALF))
    assert "compute capability 9.0" in fault
    (fault,) = faults(config_of({"emulate": False}))
    assert 'training.mixed_precision_param = "float32": use "bfloat16"' in fault


def test_a_missing_torchao_is_reported_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    (fault,) = faults(config_of())
    assert "torchao, which is not installed: pip install 'titanlite[float8]'" in fault
