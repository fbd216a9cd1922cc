"""A family's factors on rates and initial weights, and muP, which consists of such factors: models/mup.py."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import llama3, qwen3_moe
from models.blocks import Normal
from tests.distributed.as_one import as_one_process
from tests.distributed.scenarios import config_of
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.loss import sequence_of
from titanlite.optim.build import build_optimizer, model_faults
from titanlite.registry.family import Family, load_family
from titanlite.transforms.initialize import initialize, match_initial
from titanlite.transforms.meta import on_meta
from titanlite.verify import coordinates
from titanlite.verify.coordinates import ROWS, STEPS, TOKENS, VOCABULARY, growing, measure
from titanlite.verify.facts import name_faults

SIZES: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
DENSE = SIZES | {"ffn_dim": 96, "mup_base_dim": 16}
MOE = SIZES | {"expert_dim": 48, "mup_base_dim": 16}


def configured(
    name: str = "llama3", overrides: dict[str, Any] = DENSE, degrees: dict[str, int] | None = None, **sections: Any
) -> Config:
    model = {"name": name, "flavor": "debug", "overrides": overrides}
    return config_of(degrees or {}, model=model, **sections)


def factors_of(config: Config) -> dict[str, float]:
    model = on_meta(load_family(config.model.name, "debug", overrides=config.model.overrides), config)
    model.to_empty(device="cpu")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = build_optimizer(model, config.optimizer).param_groups
    return {names[id(p)]: group["titanlite_lr_factor"] for group in groups for p in group["params"]}


# ------------------------------------------------------------------------------------------------------- factors


def test_rates_of_matrices_routers_and_experts_decrease_with_the_width_and_groups_multiply_them():
    """Width 64 with base 16: a quarter, and half of that for layer 0, whose entry has lr = 0.5."""
    found = factors_of(configured(optimizer={"groups": [{"pattern": "layers.0.*", "lr": 0.5}]}))
    assert found["layers.1.attention.wq.weight"] == found["layers.1.ffn.w2.weight"] == found["head.output.weight"] == 0.25
    assert found["layers.0.attention.wo.weight"] == 0.125
    assert found["embed.weight"] == found["head.norm.weight"] == found["layers.1.ffn_norm.weight"] == 1.0
    assert found["layers.0.ffn_norm.weight"] == 0.5
    found = factors_of(configured("qwen3_moe", MOE))
    assert found["layers.0.ffn.router.weight"] == found["layers.1.ffn.experts.w2"] == 0.25


def test_muon_scales_matrices_by_the_root_of_the_factor_and_routers_and_the_head_by_the_factor(group_of_one):
    found = factors_of(configured("qwen3_moe", MOE, optimizer={"name": "Muon", "implementation": "for-loop"}))
    assert found["layers.0.attention.wq.weight"] == found["layers.0.ffn.experts.w1"] == 0.5
    assert (found["layers.0.ffn.router.weight"], found["head.output.weight"], found["embed.weight"]) == (0.25, 0.25, 1.0)


@pytest.mark.parametrize(("name", "overrides"), [("llama3", DENSE), ("qwen3_moe", MOE)])
def test_initial_deviations_decrease_with_the_root_of_the_width_and_those_of_outputs_with_the_width(name, overrides):
    found, faults = match_initial((family := load_family(name, "debug", overrides=overrides)).on_meta(), family)
    assert faults == []
    standard = load_family(name, "debug", overrides=overrides | {"mup_base_dim": "none"})
    plain, _ = match_initial(standard.on_meta(), standard)
    outputs = {"head.output.weight", *(each for each in found if "router" in each)}
    hidden = {each for each in found if re.search(r"\.w[qkvo123](\.weight)?$", each)}
    assert len(hidden) >= 14
    for each, distribution in found.items():
        factor = 0.25 if each in outputs else 0.5 if each in hidden else 1.0
        was = plain[each]
        assert distribution == (was._replace(std=was.std * factor) if isinstance(was, Normal) else was), each


def test_without_a_base_width_and_at_the_base_width_nothing_changes():
    plain = llama3.FLAVORS["debug"]
    assert llama3.lr_scale(plain) == llama3.init_scale(plain) == {}
    at_base = load_family("llama3", "debug", overrides={"mup_base_dim": 256})
    models = [each.on_meta() for each in (at_base, Family(llama3, plain))]
    for model, family in zip(models, (at_base, Family(llama3, plain)), strict=True):
        initialize(model, family, 0, torch.device("cpu"))
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def test_the_export_needs_no_multiplier():
    """A model with muP is the same function of its weights as one without, so config.json needs no new key."""
    family, wide = load_family("llama3", "debug", overrides=DENSE), {**DENSE, "mup_base_dim": "none"}
    assert name_faults(family) == []
    standard = load_family("llama3", "debug", overrides=wide)
    assert llama3.to_hf(family.config) == llama3.to_hf(standard.config)


# ------------------------------------------------------------------------------------------------------- what is refused


def changed(**parts: Any) -> Family:
    names = ("Config", "FLAVORS", "Model", "sharding", "initial", "flops")
    module = SimpleNamespace(**({name: getattr(llama3, name) for name in names} | parts))
    return Family(module, llama3.Config(64, 2, 4, 2, 16, 96, vocab_size=128))  # type: ignore[arg-type]


REFUSED = [
    ({"lr_scale": {"layers.*.wx.weight": 0.5}}, "lr_scale: the pattern 'layers.*.wx.weight' matches nothing"),
    ({"init_scale": {"embed.*": float("nan")}}, "init_scale: the pattern 'embed.*' has nan"),
    ({"init_scale": {"*norm.weight": 0.5}}, "init_scale: layers.*.attention_norm.weight is neither Normal nor Uniform"),
]


@pytest.mark.parametrize(("tables", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_factor_without_effect_or_meaning_is_refused(tables, words):
    family = changed(**{name: lambda _, table=table: table for name, table in tables.items()})
    assert any(fault.startswith(words) for fault in match_initial(family.on_meta(), family)[1])


def test_tied_embeddings_a_fork_without_the_tables_and_adapters_are_refused():
    with pytest.raises(UserError, match="mup_base_dim needs tied_embeddings = false"):
        load_family("llama3", "debug", overrides=DENSE | {"tied_embeddings": True})
    fork = changed()._replace(config=llama3.Config(64, 2, 4, 2, 16, 96, vocab_size=128, mup_base_dim=16))
    assert [fault[:12] for fault in match_initial(fork.on_meta(), fork)[1]] == ["mup_base_dim"]
    config = configured(lora={"enable": True, "rank": 4})
    model = on_meta(load_family("llama3", "debug", overrides=DENSE), config)
    assert [fault[:8] for fault in model_faults(config.optimizer, model)] == ["lr_scale"]


# ------------------------------------------------------------------------------------------------------- meshes, widths


MESHES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "2 x 2": ({"dp_shard": 2, "tp": 2}, "llama3", DENSE),
    "pp 2": ({"pp": 2}, "llama3", DENSE),
    "ep 2": ({"dp_shard": 2, "ep": 2}, "qwen3_moe", MOE),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_losses_and_gradients_are_those_of_one_process(pools, mesh):
    degrees, name, overrides = MESHES[mesh]
    training = {"steps": 3, "local_batch_size": 2}
    split, alone = as_one_process(pools, degrees, lambda each: configured(name, overrides, each, training=training))
    assert split.weights.keys() == alone.weights.keys()
    assert [each for each, value in alone.weights.items() if not torch.equal(value, split.weights[each])] == []


@pytest.mark.slow
def test_activations_keep_their_size_with_mup_and_grow_without():
    family = load_family("llama3", "debug", overrides={"mup_base_dim": 64, "n_layers": 2})
    assert growing(measure(family)) == []
    standard = measure(load_family("llama3", "debug", overrides={"n_layers": 2}))
    assert [fault[:9] for fault in growing(standard)][:2] == ["layers.0:", "layers.1:"]
    assert standard.exponent("layers.1", STEPS) > 0.5


def test_a_step_has_the_last_output_of_a_block_that_runs_several_times(monkeypatch):
    monkeypatch.setattr(coordinates, "SEEDS", 1)
    monkeypatch.setattr(coordinates, "FACTORS", (1.0,))
    family = load_family("tests.forks.right.looped", "plain")
    model = family.on_meta()
    initialize(model, family, 0, torch.device("cpu"))
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))[:, :-1]
    after = model(tokens, sequence_of(tokens, None)).abs().mean().item()  # the result of the last block
    sizes = measure(family).sizes
    assert {name: len(of_steps) for name, of_steps in sizes.items()} == dict.fromkeys(
        ["layers.0", "layers.1", "logits"], STEPS + 1
    )
    assert sizes["layers.1"][0] == [pytest.approx(after, rel=1e-5)]


@pytest.mark.slow
def test_the_coordinate_check_finds_a_rate_that_does_not_decrease(monkeypatch):
    monkeypatch.setattr(qwen3_moe, "lr_scale", lambda config: {"*": 1.0})
    family = load_family("qwen3_moe", "debug", overrides={"mup_base_dim": 64, "n_layers": 2})
    assert growing(measure(family))
