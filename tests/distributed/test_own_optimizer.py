"""An optimizer of the user's own on meshes: the steps of one process. tests/own/test_together.py resumes."""

import math
from typing import Any

import pytest
import torch

from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import CPU, config_of, mesh_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, run, stored
from titanlite.config.schema import Config
from titanlite.loop.step import build_model, update
from titanlite.optim.build import build_optimizer
from titanlite.optim.state import named_state
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import family_of
from titanlite.transforms.shards import local_part

HERE, GIVEN = "tests.distributed.test_own_optimizer", "tests.distributed.scenarios:given_gradients"
LION: dict[str, Any] = {"name": "tests.own.parts:Lion", "options": {"betas": [0.9, 0.98]}}
WHOLE = {"name": "tests.own.parts:SpectralDescent", "weight_decay": 0.0}
DENSE, MOE = {"name": "tests.tiny", "flavor": "uneven"}, {"name": "tests.tiny_moe", "flavor": "plain"}
CELLS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "2 x 2": (TWO_BY_TWO, DENSE),
    "pp 2 x shard 2": ({"pp": 2, "dp_shard": 2}, DENSE),
    "ep 2": ({"dp_shard": 2, "ep": 2}, MOE),
}


def configured(degrees: dict[str, int], optimizer: dict[str, Any], model: dict[str, str], accumulation: int = 1) -> Config:
    return config_of(degrees, model["flavor"], accumulation, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("cell", "optimizer"),
    [*((cell, optimizer) for cell in CELLS for optimizer in (LION, WHOLE)), ("2 x 2", {"name": "torch.optim:RAdam"})],
)
def test_the_same_gradients_give_the_weights_and_state_of_one_process(pools, cell, optimizer):
    degrees, model = CELLS[cell]
    expected = pools[1].run(GIVEN, degrees=ONE, config=configured(ONE, optimizer, model), steps=3)[0]
    config = configured(degrees, optimizer, model, 2 if "pp" in degrees else 1)
    stages = pools[ranks_of(degrees)].run(GIVEN, degrees=degrees, config=config, steps=3)
    found = {name: tensor for stage in stages for name, tensor in stage.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def test_state_is_resharded_if_a_run_continues_on_another_mesh(pools, tmp_path):
    run(pools, TWO_BY_TWO, tmp_path, 4, optimizer=LION, flavor="uneven")
    before = stored(tmp_path, 4)
    still = {**LION, "options": {"betas": [0.9, 1.0]}}  # does not change the state
    allowed = {"allow_changes": ["optimizer.options"], "interval": 1}
    run(pools, {"dp_shard": 2}, tmp_path, 5, optimizer=still, flavor="uneven", checkpoint=allowed)
    after = stored(tmp_path, 5)
    means = [name for name, tensor in before.items() if name.endswith(".mean") and tensor.any()]
    assert len(means) > 5
    assert [name for name in means if not torch.equal(after[name], before[name])] == []


def test_the_first_step_after_weights_were_loaded_is_the_optimizers_first(pools, tmp_path):
    run(pools, ONE, tmp_path / "first", 1)
    loaded = {"initial_load_path": str(tmp_path / "first/checkpoint/step-00000001")}
    run(pools, ONE, tmp_path / "second", 1, optimizer={"name": "torch.optim:RAdam"}, checkpoint=loaded)
    counts = [tensor.item() for name, tensor in stored(tmp_path / "second", 1).items() if name.endswith(".step")]
    assert counts and {*counts} == {1.0}


class KeepsItsStart(torch.optim.SGD):
    """Its state is a copy of the first weights that it gets, as in Lookahead. It takes parameters without their names."""

    def __init__(self, params, lr, weight_decay=0.0):
        unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in params]
        super().__init__(unnamed, lr=lr, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("start", p.detach().clone())
                self.state[p].setdefault("count", torch.zeros(())).add_(1)
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("excluded", ["optimizer.*", "optimizer.*.start"])
def test_excluded_state_that_copies_the_weights_is_made_of_the_loaded_ones(pools, tmp_path, excluded):
    """It was that of the random initial weights, towards which such an optimizer pulled the trained model."""
    name, degrees, checkpoint = f"{HERE}:KeepsItsStart", {"dp_shard": 2}, {"interval": 1}
    run(pools, degrees, tmp_path, 2, optimizer={"name": name}, flavor="uneven", checkpoint=checkpoint)
    checkpoint |= {"exclude_from_loading": [excluded]}
    run(pools, degrees, tmp_path, 3, optimizer={"name": name}, flavor="uneven", checkpoint=checkpoint)
    before, after = stored(tmp_path, 2), stored(tmp_path, 3)
    starts = [each for each in after if each.endswith(".start")]
    assert len(starts) > 5
    for each in starts:
        weight = each.replace("optimizer.", "model.").removesuffix(".start")
        torch.testing.assert_close(after[each], before[weight], rtol=0, atol=0)
    counts = {tensor.item() for each, tensor in after.items() if each.endswith(".count")}
    assert counts == ({3.0} if excluded.endswith("start") else {2.0})


class KeepsItsShard(torch.optim.SGD):
    """Its state is plain tensors, as large as the shard."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                local, grad = local_part(p), local_part(p.grad)
                kept = self.state[p].setdefault("kept", torch.zeros_like(local))
                local.sub_(kept.add_(grad), alpha=group["lr"])


def test_plain_state_of_a_shards_shape_is_saved_as_that_of_the_whole_parameter(pools):
    found = {}
    for degrees in (ONE, TWO_BY_TWO):
        config = configured(degrees, {"name": f"{HERE}:KeepsItsShard"}, DENSE)
        found[str(degrees)] = pools[ranks_of(degrees)].run(GIVEN, degrees=degrees, config=config, steps=3)[0]
    expected, sharded = found.values()
    assert sharded.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-6, atol=1e-8)


class IgnoresTheShard(torch.optim.SGD):
    """Its state has a value for each row of the shard."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if hasattr(p, "to_local") else p
                self.state[p]["rows"] = torch.zeros(local.shape[0] if p.ndim == 2 and local is not p else p.shape)


def test_state_that_does_not_follow_the_shards_is_refused_with_class_and_line(pools):
    config = configured(TWO_BY_TWO, {"name": f"{HERE}:IgnoresTheShard"}, DENSE)
    with pytest.raises(
        WorkerFailure, match=r'test_own_optimizer:IgnoresTheShard" \(.*test_own_optimizer.py, line \d+\)'
    ) as failure:
        pools[4].run(GIVEN, degrees=TWO_BY_TWO, config=config, steps=3)
    assert 'state["rows"] of a parameter of shape' in str(failure.value)


def moved_by_rest(degrees: dict[str, int], config: Config) -> list[str]:
    """The parameters whose state differs between no gradient and a gradient of zeros."""
    found = []
    for zeros in (False, True):
        model = build_model(family_of(config.model), config, mesh_of(degrees), CPU)
        optimizer = build_optimizer(model, config.optimizer)
        for number, p in enumerate(model.parameters()):
            p.grad = torch.ones_like(p) if number else torch.zeros_like(p) if zeros else None
        update(model, optimizer, 1e-3, math.inf)
        found.append({name: tensor.clone() for name, tensor in named_state(optimizer, model).items()})
    first, second = found
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_a_parameter_that_no_gradient_reaches_has_state_in_every_checkpoint(pools):
    assert pools[1].run(f"{HERE}:moved_by_rest", degrees=ONE, config=configured(ONE, LION, DENSE))[0] == []
