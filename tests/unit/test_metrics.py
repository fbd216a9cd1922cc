"""The reports of a run: speed of training only, metrics.jsonl, TensorBoard."""

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models.blocks import Flops
from titanlite.config.schema import Config
from titanlite.data.timeline import Timeline
from titanlite.loop.divergence import StepRecord
from titanlite.loop.metrics import Clock, Reporter, console_line, speed
from titanlite.loop.resume import Progress

# --------------------------------------------------------------------------------------------------------------- speed


def test_speed_excludes_pauses_and_reports_them(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("titanlite.loop.metrics.time.perf_counter", lambda: now)
    clock = Clock(now)
    now += 6
    with clock.phase(3, "reading data"):  # a part of training
        now += 2
    for seconds in (20, 5):
        with clock.phase(3, "saving", "save"):
            now += seconds
    with clock.phase(3, "forward and backward"):
        pass
    clock.add_pause("startup", 100)
    now += 100
    clock.steps = 2
    values = speed(clock, step_tokens=2000, devices=4, flops=Flops(causal=6.0, palm=8.0), peak=1000.0, waited=2)
    assert values == {
        "tokens_per_second": 500,
        "tokens_per_second_per_device": 125,
        "data_wait_fraction": 0.25,
        "save_seconds": 25,
        "startup_seconds": 100,
        "mfu_causal": pytest.approx(125 * 6 / 1000),
        "mfu_palm": pytest.approx(125 * 8 / 1000),
    }


# ------------------------------------------------------------------------------------------------------------- reports


def _report(folder, first_step: int, reports: dict[int, dict], tensorboard: bool = False) -> None:
    config = Config.model_validate({"job": {"dump_folder": str(folder)}, "metrics": {"enable_tensorboard": tensorboard}})
    reporter = Reporter(config, first_step, active=True)
    for step, values in reports.items():
        reporter.report(step, values)
    reporter.close()


def _lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_numbers_are_written_unrounded(tmp_path):
    values = {"loss": 1 / 3, "grad_norm": math.pi * 1e-9, "tokens_seen": 2**60 + 1}
    _report(tmp_path, 1, {1: values})
    assert _lines(tmp_path) == [{"step": 1, **values}]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', "\0\0\0"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    _report(tmp_path, 1, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    _report(tmp_path, 3, {3: {"loss": 3.0}})
    assert _lines(tmp_path) == [{"step": step, "loss": float(step)} for step in (1, 2, 3)]


def test_reports_that_another_start_makes_again_are_kept_beside_it(tmp_path):
    """A start without checkpoints emptied the metrics of a finished run."""
    for first, last in ((1, 4), (3, 4), (1, 1)):
        _report(tmp_path, first, {step: {"loss": first + step / 10} for step in range(first, last + 1)})
    aside = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl.aside").read_text().splitlines()]
    assert (aside, _lines(tmp_path)) == ([1.3, 1.4, 1.1, 1.2, 3.3, 3.4], [{"step": 1, "loss": 1.1}])


def _board(folder) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@pytest.mark.parametrize("later", [(5,), ()])
def test_tensorboard_has_the_same_scalars_also_after_a_resume(tmp_path, later):
    _report(tmp_path, 1, {step: {"loss": step / 3, "lr": 1e-3} for step in (1, 2, 3, 4)}, tensorboard=True)
    _report(tmp_path, 3, {step: {"loss": step / 7, "lr": 2e-3} for step in later}, tensorboard=True)
    expected = {name: {line["step"]: _float32(line[name]) for line in _lines(tmp_path)} for name in ("loss", "lr")}
    assert list(expected["loss"]) == [1, 2, *later]
    assert _board(tmp_path / "tb") == expected


def test_console_line_of_a_step_without_labels_or_a_finite_norm():
    without = {"loss_mean": None, "loss": None, "grad_norm": math.inf}
    assert console_line(7, 100, without) == "step   7/100  mean loss n/a  loss n/a  grad norm not finite"


def test_console_line_shows_pauses_and_no_values_of_own_code():
    values = {"save_seconds": 1.0, "extra/load_seconds": None}
    assert console_line(7, 100, values) == "step   7/100  save 1.00 s"


BEGINNING = Progress(0, Timeline([]))


def test_the_mean_loss_is_over_finite_losses_since_the_last_multiple_for_any_reading_interval():
    losses = [5.0, 4.0, math.nan, 3.0, 2.5, math.inf, math.nan, math.nan, 2.0, 1.0]
    steps = [StepRecord(number, 0, loss, 1.0) for number, loss in enumerate(losses, 1)]
    expected = {1: 5.0, 2: 4.5, 3: 4.5, 4: 4.0, 5: 2.5, 8: 2.5, 9: 2.0, 10: 1.5}
    for step, mean in expected.items():
        for cut in range(step + 1):
            read = BEGINNING.with_losses(steps[:cut], 4).with_losses(steps[cut:step], 4)
            assert read.loss_mean == mean
    assert BEGINNING.with_losses(steps[5:8], 10).loss_mean is None
    assert BEGINNING.loss_mean is None
