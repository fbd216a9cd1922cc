"""Adapters on one process: frozen and trained parameters, the results of the adapted model, and merging."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.attention import SeqInfo
from tests import tiny, tiny_biased
from tests.distributed.scenarios import config_of
from tests.token_files import data_of
from titanlite.config.schema import Config
from titanlite.config.schema import Lora as Keys
from titanlite.ground.errors import UserError
from titanlite.loop.resume import Progress, RunIdentity, restore
from titanlite.optim.state import checkpoint_bytes
from titanlite.registry.family import Family, load_family
from titanlite.transforms.initialize import initialize
from titanlite.transforms.lora import LoraLinear, adapt, merged
from titanlite.transforms.meta import on_meta, training_flops
from titanlite.transforms.parameters import A, B, is_adapter

CPU = torch.device("cpu")
MATRICES = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")] + [f"ffn.{name}" for name in ("w1", "w2", "w3")]
FAMILY = Family(tiny, tiny.FLAVORS["plain"])


def configuration(precision: str = "float32", **keys: Any) -> Config:
    return config_of({}, training={"mixed_precision_param": precision}, lora={"enable": True, "rank": 4, **keys})


def adapted(family: Family = FAMILY, precision: str = "float32", moved: float = 0.0, **keys: Any) -> nn.Module:
    """The tiny Llama with adapters and its initial weights; `moved`: the deviation of lora_b, as if it had been trained."""
    model = on_meta(family, configuration(precision, **keys))
    initialize(model, family, 0, CPU)
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(B):
            parameter.data.normal_(0.0, moved, generator=random)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(64).view(2, 32) * 7 % 512
    return model.head(model(tokens, SeqInfo(torch.arange(32).expand(2, 32))))


# ------------------------------------------------------------------------------------------------------------- the surgery


def test_only_adapters_are_trained_and_every_other_name_is_that_of_the_base():
    base, model = dict(FAMILY.on_meta().named_parameters()), adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"layers.{i}.{matrix}.{part}" for i in (0, 1) for matrix in MATRICES for part in (A, B)}
    assert {name for name, _ in model.named_parameters()} - trained == base.keys()
    assert {name for name, _ in model.named_parameters() if is_adapter(f"model.{name}")} == trained


def test_the_linear_layers_of_blocks_that_a_pattern_matches_get_one_adapter_each():
    expected = {"layers.0.ffn.w2", "layers.0.ffn.w3", "layers.1.ffn.w2"}
    model = adapted(modules=["*.w2", "layers.0.*.w[23]"], rank=3)
    assert {name for name, module in model.named_modules() if isinstance(module, LoraLinear)} == expected
    for name in expected:
        module = model.get_submodule(name)
        assert (module.lora_a.shape, module.lora_b.shape) == ((3, module.in_features), (module.out_features, 3))


def test_a_tied_weight_takes_no_adapter_but_a_layer_that_blocks_share_takes_one():
    """An export merged the adapter of the weight's first name into both, and left out the other one."""
    family = load_family("tests.forks.tied_in_constructor", "plain")
    with pytest.raises(UserError, match=r"the weight of layers\.\*\.ffn\.w1 is another module's too"):
        adapted(family)
    assert adapted(family, modules=["*.attention.*", "*.w2"])
    for fork in ("tests.forks.right.shared_attention", "tests.forks.plain_names"):  # one names it outside of blocks first
        shared = adapted(load_family(fork, "plain"), modules=["*.attention.wq"])
        assert isinstance(shared.layers["1"].attention.wq, LoraLinear)


class Special(nn.Linear):
    """A linear layer that computes something else."""


def test_a_subclass_of_linear_gets_no_adapter_and_no_hint_names_it():
    model = FAMILY.on_meta()
    model.layers["0"].ffn.w1.__class__ = Special
    adapt(model, Keys(modules=["*.ffn.*"]), torch.float32)
    assert [type(layer.ffn.w1) for layer in model.layers.values()] == [Special, LoraLinear]
    model = FAMILY.on_meta()
    for layer in model.layers.values():
        layer.ffn.w1.__class__ = Special
    with pytest.raises(UserError, match=r"lora\.modules") as raised:
        adapt(model, Keys(modules=["*.ffn.w1", "*.w2"]), torch.float32)
    assert "ffn.w1" not in str(raised.value).partition("; ")[2]


# -------------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("family", [FAMILY, Family(tiny_biased, tiny_biased.FLAVORS["plain"])], ids=["plain", "biased"])
def test_an_adapted_layer_adds_the_scaled_product_of_its_two_matrices(family):
    model = adapted(family, moved=0.3, rank=4, alpha=6.0)
    layer = model.layers["1"].attention.wq
    x = torch.randn(2, 5, 64)
    w, a, b = (tensor.detach().double() for tensor in (layer.weight, layer.lora_a, layer.lora_b))
    expected = x.double() @ w.T + 1.5 * x.double() @ (b @ a).T
    if layer.bias is not None:
        expected += layer.bias.detach().double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_b_is_initialized_to_zero_and_a_with_variance_one_over_in():
    initialized = on_meta(FAMILY, configuration(rank=64, modules=["*.w[qo]", "*.w[123]"]))
    initialize(initialized, FAMILY, 0, CPU)
    for name, parameter in initialized.named_parameters():
        if name.endswith(B):
            assert not parameter.any(), name
        if name.endswith(A):
            assert parameter.std().item() == pytest.approx(parameter.shape[1] ** -0.5, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.01, name


def test_flops_are_those_of_the_matmuls_in_a_step():
    dim, kv, ffn, vocabulary, layers, rank = 64, 32, 96, 512, 2, 4
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (dim, ffn), (ffn, dim)]
    frozen = layers * sum(rows * columns for rows, columns in shapes) + vocabulary * dim
    trained = layers * sum(rank * (rows + columns) for rows, columns in shapes)
    config = configuration()
    found = training_flops(FAMILY, config)
    whole = FAMILY.module.flops(FAMILY.config, 32)
    # 2 FLOPs per weight forward, 2 for the gradient of the input, 2 for its own gradient if it is trained
    assert found.palm - (whole.palm - 6 * frozen) == 4 * frozen + 6 * trained
    assert found.causal - (whole.causal - 6 * frozen) == 4 * frozen + 6 * trained
    plain = Config.model_validate({"training": {"seq_len": 32}})
    assert training_flops(FAMILY, plain) == whole


def test_frozen_weights_take_two_bytes_and_adapters_twelve_in_checkpoints():
    """test_recipes.py has their memory."""
    config = configuration("bfloat16", rank=8)
    model = on_meta(FAMILY, config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    assert checkpoint_bytes(model, config.optimizer) == 2 * frozen + 12 * trained


# -------------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("flavor", ["plain", "tied"])
def test_merged_weights_in_a_plain_model_give_the_adapted_models_logits(flavor):
    family = Family(tiny, tiny.FLAVORS[flavor])
    keys = configuration(alpha=6.0, modules=["layers.*.attention.*", "layers.1.ffn.w[12]"]).lora
    model = adapted(family, moved=0.3, **keys.model_dump())
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    names, read = merged(tensors, tensors.__getitem__, keys.model_dump())
    plain = family.on_meta()
    assert names == [f"model.{name}" for name, _ in plain.named_parameters()]
    state = {name.removeprefix("model."): read(name) for name in names}
    plain.load_state_dict(state | ({"head.output.weight": state["embed.weight"]} if flavor == "tied" else {}), assign=True)
    base = adapted(family, **keys.model_dump())
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    assert (logits(base) - logits(model)).abs().max() > 0.1


@pytest.mark.parametrize("enable", [True, False])
def test_adapters_on_random_weights_cause_a_warning(caplog, enable):
    nothing: Any = None
    with caplog.at_level(logging.WARNING):
        config = configuration(enable=enable)
        data = data_of([np.arange(500)], config, 512)
        progress, _ = restore(RunIdentity(config, FAMILY, data, 8), on_meta(FAMILY, config), nothing, None, nothing)
    assert progress == Progress(0, data.timeline(8))
    assert ["the weights that are adapted are RANDOM" in record.message for record in caplog.records] == [True] * enable


def test_a_familys_own_parameters_may_have_the_names_of_adapters():
    """A fork with its own adapters is initialized by its own table, and gets no others."""

    class Module:
        sharding, flops, initial = tiny.sharding, tiny.flops, tiny.initial

        class Model(tiny.Model):
            def __init__(self, config: tiny.Config):
                super().__init__(config)
                self.layers["0"].lora_b = nn.Parameter(torch.empty(8, 8))

    family = Family(Module, tiny.FLAVORS["plain"])
    model = family.on_meta()
    initialize(model, family, 0, CPU)
    assert model.layers["0"].lora_b.std() > 0.01
    with pytest.raises(UserError, match=r"lora\.enable"):
        on_meta(family, configuration())
