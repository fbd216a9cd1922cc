"""optimizer.ema_decay: the average on every mesh, through resumes and skipped steps, in validation, exports and predictions."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.checkpoint_runs import train
from tests.distributed.scenarios import CPU, config_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, Degrees, reports, run, stored
from tests.distributed.test_variants import LORA, MOE, SPLIT, STAGES, rounded
from tests.repetitions import slow_but
from titanlite.checkpoint import manifest
from titanlite.checkpoint.whole import Stored
from titanlite.config.schema import Optimizer
from titanlite.ground.errors import UserError
from titanlite.hf import export as exporting
from titanlite.loop.step import update
from titanlite.optim.build import build_optimizer
from titanlite.optim.ema import attach, ema_of
from titanlite.optim.state import checkpoint_bytes
from titanlite.registry.family import load_family
from titanlite.tools.open_model import open_model
from titanlite.transforms.meta import on_meta

DECAY = 0.8  # reached at the third update


def share(updates: float) -> float:
    """The share of the newest weights in the average, after this many updates."""
    return max(1 - DECAY, 9 / (10 + updates))


def averaged(pools, degrees: Degrees, folder: Path, steps: int, **sections: Any) -> None:
    optimizer = {"ema_decay": DECAY, **sections.pop("optimizer", {})}
    checkpoint = {"interval": 1, "keep_latest_k": 0, **sections.pop("checkpoint", {})}
    run(pools, degrees, folder, steps, optimizer=optimizer, checkpoint=checkpoint, **sections)


def assert_closed_form(folder: Path, first: int, last: int, begun: int = 0) -> dict[str, Tensor]:
    """Asserts that each checkpoint's average is the previous one, moved towards the weights; returns the last tensors.

    begun: the step after which the average started.
    """
    before = stored(folder, first)
    for step in range(first + 1, last + 1):
        now = stored(folder, step)
        assert now["ema.updates"] == step - begun
        names = [name.removeprefix("ema.") for name in now if name.startswith("ema.") and name != "ema.updates"]
        assert names
        for name in names:
            average, weight = before[f"ema.{name}"].double(), now[f"model.{name}"].double()
            expected = average + share(step - begun) * (weight - average)
            torch.testing.assert_close(now[f"ema.{name}"].double(), expected, rtol=1e-6, atol=1e-7)
            assert now[f"ema.{name}"].dtype == torch.float32
        before = now
    return before


def assert_begins_with(before: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Asserts that the average after its first update is that of these weights and the next ones."""
    for name in [name.removeprefix("model.") for name in before if name.startswith("model.")]:
        expected = before[f"model.{name}"] + share(1) * (now[f"model.{name}"] - before[f"model.{name}"])
        torch.testing.assert_close(now[f"ema.{name}"], expected, rtol=1e-6, atol=1e-7)


MESHES: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "stages, tied": (STAGES, {"flavor": "tied", "training": {"local_batch_size": 4}}),
    "split experts": (SPLIT, MOE),
    "adapters": ({"dp_shard": 2}, LORA),
    "bfloat16": ({"dp_shard": 2}, rounded("compensated")),
    "2 x 2, an optimizer that makes its state in a step": (
        TWO_BY_TWO,
        {"flavor": "uneven", "optimizer": {"name": "tests.own.parts:Lion"}},
    ),
}


@pytest.mark.parametrize("name", slow_but([*MESHES][:2], MESHES))
def test_the_average_is_the_closed_form_of_the_weights_of_all_steps(pools, tmp_path, name):
    degrees, sections = MESHES[name]
    averaged(pools, degrees, tmp_path, 4, **sections)
    last = assert_closed_form(tmp_path, 1, 4)
    trained = {each.rpartition(".")[0] for each in last if each.startswith("optimizer.")}
    assert {each for each in last if each.startswith("ema.")} == {"ema.updates"} | {
        f"ema.{each.removeprefix('optimizer.')}" for each in trained
    }


def test_the_average_continues_on_other_meshes(pools, tmp_path):
    for degrees, steps in ((TWO_BY_TWO, 2), (ONE, 4), (STAGES, 6)):
        averaged(pools, degrees, tmp_path, steps, training={"local_batch_size": 2 if degrees == TWO_BY_TWO else 4})
    assert_closed_form(tmp_path, 1, 6)


def test_a_resume_may_start_or_end_an_average_and_logs_it(pools, tmp_path):
    keys = {"checkpoint": {"interval": 1}}
    train(pools, ONE, tmp_path, 2, **keys)
    begun = train(pools, ONE, tmp_path, 4, optimizer={"ema_decay": DECAY}, **keys)[0]
    assert [line for line in begun.log if "has no EMA, which begins with its weights" in line]
    assert_begins_with(stored(tmp_path, 2), stored(tmp_path, 3))
    assert_closed_form(tmp_path, 3, 4, begun=2)
    ended = train(pools, ONE, tmp_path, 5, **keys)[0]
    assert [line for line in ended.log if "its EMA is dropped" in line]
    assert not any(name.startswith("ema.") for name in stored(tmp_path, 5))


def test_a_new_average_starts_from_the_loaded_weights(pools, tmp_path):
    run(pools, ONE, tmp_path / "first", 3)
    source = tmp_path / "first/checkpoint/step-00000003"
    averaged(pools, ONE, tmp_path / "second", 1, checkpoint={"initial_load_path": str(source)})
    assert_begins_with(stored(tmp_path / "first", 3), stored(tmp_path / "second", 1))


@pytest.mark.parametrize("skipped", ["an infinite gradient", "no labels"])
def test_a_skipped_step_does_not_move_the_average(group_of_one, skipped):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = build_optimizer(model, Optimizer(implementation="fused"))
    attach(optimizer, DECAY)
    average = ema_of(optimizer)
    assert average is not None

    def step(gradient: float, labels: float) -> dict[str, Tensor]:
        for p in model.parameters():
            p.grad = torch.full_like(p, gradient)
        update(model, optimizer, 0.1, 1.0, labels=torch.tensor(labels))
        return {name: tensor.clone() for name, tensor in average.tensors(model).items()}

    first = step(1.0, 5.0)
    second = step(float("inf"), 5.0) if skipped == "an infinite gradient" else step(1.0, 0.0)
    assert all(torch.equal(second[name], first[name]) for name in first)
    third = step(1.0, 5.0)
    assert third["ema.updates"] == 2
    assert not torch.equal(third["ema.weight"], first["ema.weight"])


# ------------------------------------------------------------------------------------------------------- what it is for


def test_validation_measures_the_average_and_does_not_change_training(pools, tmp_path, monkeypatch):
    validation = {"enable": True, "freq": 2, "steps": 2}
    run(pools, TWO_BY_TWO, tmp_path / "without", 4, validation=validation)
    averaged(pools, TWO_BY_TWO, tmp_path / "with", 4, validation=validation)
    plain, found = reports(tmp_path / "without"), reports(tmp_path / "with")
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [report.get(key) for report in found] == [report.get(key) for report in plain]
    last = found[-1]
    assert last["validation_loss_ema"] - last["validation_loss"] > 1e-3  # the average lags behind
    assert "validation_loss_ema" not in plain[-1]
    # the loss of a model whose weights are the average
    source = tmp_path / "with/checkpoint/step-00000004"
    of_the_run = manifest.read(source).numbers["data"]["tokenizer"]  # the tokens come from no tokenizer
    monkeypatch.setattr("titanlite.data.sources.tokenizer_digest", lambda _: of_the_run)
    exporting.export(source, tmp_path / "hf", named="tests.tiny", average=True)
    run(pools, ONE, tmp_path / "of it", 1, validation=validation, optimizer={"lr": 1e-20, "weight_decay": 0.0},
        checkpoint={"initial_load_path": str(tmp_path / "hf"), "initial_load_in_hf": True})  # fmt: skip
    assert reports(tmp_path / "of it")[-1]["validation_loss"] == pytest.approx(last["validation_loss_ema"], rel=1e-5)


def test_weights_ema_exports_and_opens_the_average(pools, tmp_path, group_of_one, monkeypatch):
    averaged(pools, ONE, tmp_path, 3)
    source, last = tmp_path / "checkpoint/step-00000003", stored(tmp_path, 3)
    taken = Stored(source, average=True)
    monkeypatch.setattr("titanlite.data.sources.tokenizer_digest", lambda _: "no tokenizer")
    opened = open_model(source, CPU, "float32", name="tests.tiny", average=True).model
    for name, p in opened.named_parameters():
        assert torch.equal(p, last[f"ema.{name}"])
        assert torch.equal(taken.read(f"model.{name}"), last[f"ema.{name}"])
        assert not torch.equal(p, last[f"model.{name}"])
    plain = open_model(source, CPU, "float32", name="tests.tiny").model
    assert all(torch.equal(p, last[f"model.{name}"]) for name, p in plain.named_parameters())


def test_weights_ema_of_a_checkpoint_without_an_average_is_refused(pools, tmp_path, group_of_one):
    run(pools, ONE, tmp_path, 1)
    source = tmp_path / "checkpoint/step-00000001"
    for act in (
        functools.partial(Stored, source, average=True),
        functools.partial(open_model, source, CPU, name="tests.tiny", average=True),
    ):
        with pytest.raises(UserError, match=r"--weights ema: .*step-00000001 has no EMA; .*optimizer.ema_decay"):
            act()


def test_checkpoints_count_four_bytes_for_each_trained_parameter():
    config = config_of(ONE)
    model = on_meta(load_family("tests.tiny", "plain"), config)
    with_one = config.optimizer.model_copy(update={"ema_decay": DECAY})
    more = checkpoint_bytes(model, with_one) - checkpoint_bytes(model, config.optimizer)
    assert more == 4 * sum(p.numel() for p in model.parameters())
