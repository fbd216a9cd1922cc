"""[[optimizer.groups]]: rates and decays of parameters, and frozen parameters without gradient and state, on any mesh."""

from typing import Any

import pytest
import torch

from tests.distributed.as_one import as_one_process
from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import config_of
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, losses, resumes_once, run, stored
from tests.distributed.test_variants import MOE, SPLIT
from tests.repetitions import slow_but
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.optim.build import build_optimizer, model_faults, set_lr
from titanlite.optim.state import named_state
from titanlite.parallel.pipeline import faults as pipeline_faults
from titanlite.plan.memory import kept_bytes
from titanlite.registry.family import load_family
from titanlite.transforms.groups import group_of
from titanlite.transforms.meta import active_parameters, on_meta, training_flops

FAMILY = load_family("tests.tiny", "plain")
FROZEN = "layers.*.ffn.w[13].weight"
GROUPS = [
    {"pattern": "embed.*", "lr": 0.1, "weight_decay": 0.0},
    {"pattern": FROZEN, "frozen": True},
    {"pattern": "*norm*", "weight_decay": 0.5},
]


def configured(groups: list[dict[str, Any]], **keys: Any) -> Config:
    config = config_of(ONE, optimizer={"groups": groups, "weight_decay": 0.3})
    return config.with_keys(keys)


# ------------------------------------------------------------------------------------------------- one process, by hand


def test_each_parameter_has_the_rate_and_decay_of_the_first_entry_that_matches():
    config = configured([*GROUPS, {"pattern": "*", "lr": 2.0}])
    model = on_meta(FAMILY, config).to_empty(device="cpu")
    optimizer = build_optimizer(model, config.optimizer)
    set_lr(optimizer, 0.01)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found["embed.weight"] == (0.01 * 0.1, 0.0)
    assert found["layers.0.attention_norm.weight"] == (0.01, 0.5)
    assert found["layers.1.attention.wq.weight"] == found["layers.0.ffn.w2.weight"] == (0.02, 0.3)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"layers.{layer}.ffn.w{number}.weight" for layer in (0, 1) for number in (1, 3)}
    assert found.keys() == dict(model.named_parameters()).keys() - frozen
    assert {name.rpartition(".")[0] for name in named_state(optimizer, model)} == found.keys()


def test_a_step_of_muon_with_factors_is_that_of_a_run_whose_parameters_all_have_these_rates(group_of_one):
    def after(groups: list[dict[str, Any]], lr: float, decay: float) -> dict[str, torch.Tensor]:
        keys = {"name": "Muon", "implementation": "for-loop", "groups": groups, "weight_decay": decay}
        config = config_of(ONE, optimizer=keys)
        model = on_meta(FAMILY, config).to_empty(device="cpu")
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p)
            p.grad = torch.randn_like(p)
        optimizer = build_optimizer(model, config.optimizer)
        set_lr(optimizer, lr)
        optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters() if p.ndim > 1}

    groups = [{"pattern": "layers.0.*", "lr": 0.5}, {"pattern": "layers.1.*", "weight_decay": 0.25}]
    expected = {"layers.0": after([], 0.005, 0.5), "layers.1": after([], 0.01, 0.25)}
    others = after([], 0.01, 0.5)
    for name, value in after(groups, 0.01, 0.5).items():
        torch.testing.assert_close(value, expected.get(name[:8], others)[name], rtol=1e-6, atol=1e-7)


def test_frozen_parameters_take_no_gradient_state_or_flops_in_predictions():
    plain, frozen = configured([]), configured([{"pattern": FROZEN, "frozen": True}])
    model = on_meta(FAMILY, frozen)
    count = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert count > 0
    assert kept_bytes(plain, on_meta(FAMILY, plain), 1) - kept_bytes(frozen, model, 1) == count * (4 + 8)
    before, now = training_flops(FAMILY, plain), training_flops(FAMILY, frozen)
    assert (before.causal - now.causal, before.palm - now.palm) == (2 * count, 2 * count)


def test_frozen_experts_count_with_the_experts_that_a_token_uses():
    family = load_family("tests.tiny_moe", "plain")
    model = on_meta(family, configured([{"pattern": "layers.*.experts.*", "frozen": True}]))
    layers = [module for module in model.modules() if hasattr(module, "experts")]
    assert active_parameters(model, frozen=True) == sum(layer.active_parameters() for layer in layers) > 0


# ------------------------------------------------------------------------------------------------------ what is refused


REFUSED = [
    ([{"pattern": "embd.weight", "lr": 0.1}], "matches no parameter; did you mean embed.weight?"),
    ([{"pattern": "layers.9.ffn.w1.weight"}], "matches no parameter; did you mean layers.*.ffn.w1.weight?"),
    ([{"pattern": "*", "lr": 2.0}, {"pattern": "*norm*"}], 'entry 2: pattern = "*norm*": earlier entries match all'),
    ([{"pattern": "head.*", "frozen": True, "lr": 0.1}], "lr and weight_decay have no effect with frozen = true"),
    ([{"pattern": "*", "frozen": True}], "freezes every trained parameter"),
]


@pytest.mark.parametrize(("groups", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_an_entry_without_effect_is_refused_with_its_number_and_pattern(groups, words):
    with pytest.raises(UserError) as refused:
        on_meta(FAMILY, configured(groups))
    assert words in str(refused.value) and str(refused.value).startswith("optimizer.groups")


def test_a_group_of_weights_that_lora_freezes_is_refused_and_one_of_adapters_is_not():
    keys = {"lora.enable": True, "lora.rank": 4}
    with pytest.raises(UserError, match=r"entry 1: .*: all of its parameters are frozen already"):
        on_meta(FAMILY, configured([{"pattern": "embed.*", "lr": 0.1}], **keys))
    config = configured([{"pattern": "*.lora_b", "lr": 16.0}, {"pattern": "*.lora_a", "frozen": True}], **keys)
    model = on_meta(FAMILY, config)
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"lora_b"}
    assert {group["titanlite_lr_factor"] for group in build_optimizer(model, config.optimizer).param_groups} == {16.0}


def test_a_stage_without_a_trained_block_and_muon_without_a_matrix_are_refused():
    config = config_of({"pp": 2}, optimizer={"groups": [{"pattern": "layers.1.*", "frozen": True}]})
    (fault,) = pipeline_faults(config, FAMILY, on_meta(FAMILY, config))
    assert "leave nothing to train in stage 1, blocks 1; each stage needs a trained parameter" in fault
    config = configured([{"pattern": "layers.*.w?.weight", "frozen": True}]).with_keys({"optimizer.name": "Muon"})
    (fault,) = model_faults(config.optimizer, on_meta(FAMILY, config))
    assert fault.startswith('optimizer.name = "Muon": the model has no trained matrix')


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_runs_without_adamw_if_all_other_parameters_are_frozen_and_skips_steps(group_of_one, dtype):
    groups = [{"pattern": "layers.*.w?.weight"}, {"pattern": "*", "frozen": True}]
    keys = {"optimizer.name": "Muon", "optimizer.implementation": "for-loop", "training.dtype": dtype}
    config = configured(groups).with_keys(keys)
    model = on_meta(FAMILY, config).to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p)
        p.grad = torch.ones_like(p) if p.requires_grad else None
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, config.optimizer)
    set_lr(optimizer, 0.01)
    optimizer.step()
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    for p in optimizer.state:
        p.grad.fill_(torch.nan)
    assert optimizer.defaults["fused"], "update() sets what follows for such optimizers only"
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_entries_are_read_from_a_file_and_from_the_command_line(tmp_path):
    (tmp_path / "run.toml").write_text('[[optimizer.groups]]\npattern = "head.*"\nfrozen = true\n')
    assert [group.frozen for group in read_config(tmp_path / "run.toml", []).optimizer.groups] == [True]
    config = read_config(None, ['--optimizer.groups=[{ pattern = "*norm*", lr = 0.5 }]'])
    assert group_of("head.norm.weight", config.optimizer.groups).lr == 0.5


# --------------------------------------------------------------------------------------------------------------- meshes


def experts_frozen() -> dict[str, Any]:
    return {"model": MOE["model"], "flavor": "shared", "moe": {"balance_loss": 0.01}}


# Mesh, keys, entries. Each is compared with one process.
MESHES: dict[str, tuple[dict[str, int], dict[str, Any], list[dict[str, Any]]]] = {
    "2 x 2, a whole block and the embedding": (
        TWO_BY_TWO,
        {"flavor": "tied"},
        [{"pattern": "layers.0.*", "frozen": True}, {"pattern": "embed.*", "frozen": True}],
    ),
    "pp 2": ({"pp": 2}, {"training": {"local_batch_size": 2}}, GROUPS),
    "ep 2, experts": (SPLIT, experts_frozen(), [{"pattern": "layers.*.experts.*", "frozen": True}, *GROUPS[::2]]),
    "ep 2, routers": (SPLIT, experts_frozen(), [{"pattern": "layers.*.router.*", "frozen": True}, *GROUPS[::2]]),
    "adapters, 2 x 2": (TWO_BY_TWO, {"lora": {"enable": True, "rank": 4}}, [{"pattern": "*.lora_a", "frozen": True}]),
}


@pytest.mark.parametrize("name", slow_but(["2 x 2, a whole block and the embedding", "ep 2, experts"], MESHES))
def test_losses_and_gradients_are_those_of_one_process_and_frozen_ones_have_none(pools, name):
    degrees, keys, groups = MESHES[name]
    keys = {**keys, "optimizer": {"groups": groups}, "training": {"steps": 3, **keys.get("training", {})}}
    found, alone = as_one_process(pools, degrees, lambda mesh: config_of(mesh, **keys))
    config = config_of(ONE, **keys)
    family = load_family(config.model.name, config.model.flavor)
    trained = {each for each, p in on_meta(family, config).named_parameters() if p.requires_grad}
    assert trained < found.weights.keys()
    assert found.gradients.keys() == alone.gradients.keys() == trained


# -------------------------------------------------------------------------------------------------------------- resumes


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_its_checkpoint_has_no_state_of_frozen_parameters(pools, tmp_path):
    keys = {"optimizer": {"groups": GROUPS}}
    found = resumes_once(pools, TWO_BY_TWO, tmp_path, **keys)
    run(pools, TWO_BY_TWO, tmp_path / "moved", 4, **keys)
    run(pools, ONE, tmp_path / "moved", STEPS, **keys)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert not any("ffn.w1" in name or "ffn.w3" in name for name in found if name.startswith("optimizer."))
    assert any("ffn.w2.weight.exp_avg" in name for name in found)
    early = stored(tmp_path / "whole", 10)
    for name in [name for name in found if name.startswith("model.")]:
        assert torch.equal(found[name], early[name]) == ("ffn.w1" in name or "ffn.w3" in name), name


def test_a_resume_that_unfreezes_parameters_names_the_missing_state_and_the_remedy(pools, tmp_path):
    thawed = {"optimizer": {"groups": GROUPS[::2], "ema_decay": 0.9}}
    run(pools, ONE, tmp_path, 4, optimizer={"groups": GROUPS, "ema_decay": 0.9})
    with pytest.raises(WorkerFailure, match=r"(?s)optimizer\.groups = .*--checkpoint\.allow_changes optimizer\.groups"):
        run(pools, ONE, tmp_path, 5, **thawed)
    allowed = {"allow_changes": ["optimizer.groups"]}
    with pytest.raises(WorkerFailure, match=r"(?s)ffn\.w1\.weight\.exp_avg: not in.*checkpoint.exclude_from_loading"):
        run(pools, ONE, tmp_path, 5, checkpoint=allowed, **thawed)
    excluded = [f"{kind}.layers.*.ffn.w[13].*" for kind in ("optimizer", "ema")]
    run(pools, ONE, tmp_path, 5, checkpoint={**allowed, "exclude_from_loading": excluded}, **thawed)
    assert any("ffn.w1" in name for name in stored(tmp_path, 5) if name.startswith("optimizer."))
