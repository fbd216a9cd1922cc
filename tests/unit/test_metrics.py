"""What a run reports: speed without what is not training, metrics.jsonl, TensorBoard, and the devices' peaks."""

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models.blocks import Flops
from titanlite.config.schema import Config
from titanlite.data.timeline import Timeline
from titanlite.loop.divergence import StepRecord
from titanlite.loop.metrics import Clock, Reporter, console_line, peak_flops, peak_memory_gib, speed
from titanlite.loop.resume import Progress


class _Time:
    """A clock that a test moves by hand."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("titanlite.loop.metrics.time.perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch) -> _Time:
    return _Time(monkeypatch)


# --------------------------------------------------------------------------------------------------------------- speed


def test_speed_leaves_pauses_out_and_reports_them(time):
    clock = Clock(time.now)
    time.passes(6)
    with clock.phase(3, "reading data"):  # a part of training
        time.passes(2)
    for seconds in (20, 5):
        with clock.phase(3, "saving"):
            time.passes(seconds)
    with clock.phase(3, "forward and backward"):
        time.passes(0)
    clock.add_pause("startup", 100)
    time.passes(100)
    clock.steps = 2
    assert speed(clock, step_tokens=2000, devices=4, flops=Flops(1.0, 1.0), peak=None, waited=2) == {
        "tokens_per_second": 500,
        "tokens_per_second_per_device": 125,
        "data_wait_fraction": 0.25,
        "save_seconds": 25,
        "startup_seconds": 100,
    }


def test_utilization_is_shown_both_ways_where_the_peak_is_known(time):
    clock = Clock(time.now)
    time.passes(10)
    clock.steps = 2
    values = speed(clock, step_tokens=500, devices=2, flops=Flops(causal=6.0, palm=8.0), peak=1000.0, waited=0)
    assert values["mfu_causal"] == pytest.approx(50 * 6 / 1000)
    assert values["mfu_palm"] == pytest.approx(50 * 8 / 1000)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L20", None),
    ],
)
def test_peak_is_the_devices_own_or_none(monkeypatch, name, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bfloat16") == flops
    assert peak_flops(torch.device("cuda"), "float32") is None


def test_a_cpu_has_no_peak_and_some_memory():
    assert peak_flops(torch.device("cpu"), "bfloat16") is None
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1000


# ------------------------------------------------------------------------------------------------------------- reports


def _config(folder, tensorboard: bool = False) -> Config:
    return Config.model_validate({"job": {"dump_folder": str(folder)}, "metrics": {"enable_tensorboard": tensorboard}})


def _report(folder, first_step: int, reports: dict[int, dict], tensorboard: bool = False) -> None:
    reporter = Reporter(_config(folder, tensorboard), first_step, active=True)
    for step, values in reports.items():
        reporter.report(step, values)
    reporter.close()


def _lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_numbers_are_written_unrounded(tmp_path):
    values = {"loss": 1 / 3, "grad_norm": math.pi * 1e-9, "tokens_seen": 2**60 + 1}
    _report(tmp_path, 1, {1: values})
    assert _lines(tmp_path) == [{"step": 1, **values}]


def test_reports_from_the_first_step_on_are_dropped_and_earlier_ones_kept(tmp_path):
    _report(tmp_path, 1, {step: {"loss": float(step)} for step in (1, 10, 20, 30)})
    _report(tmp_path, 20, {20: {"loss": 0.5}})
    assert _lines(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 10, "loss": 10.0}, {"step": 20, "loss": 0.5}]


@pytest.mark.parametrize("torn", ["{", '{"step": 3, "lo', '{"step": 3, "loss": 1.0}', "\0\0\0"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    _report(tmp_path, 1, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    _report(tmp_path, 3, {3: {"loss": 3.0}})
    assert _lines(tmp_path) == [{"step": step, "loss": float(step)} for step in (1, 2, 3)]


def _board(folder) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@pytest.mark.parametrize("later", [(3, 4, 5), (5,), ()])
def test_tensorboard_holds_the_same_scalars_also_after_a_resumption(tmp_path, later):
    _report(tmp_path, 1, {step: {"loss": step / 3, "lr": 1e-3} for step in (1, 2, 3, 4)}, tensorboard=True)
    _report(tmp_path, 3, {step: {"loss": step / 7, "lr": 2e-3} for step in later}, tensorboard=True)
    expected = {name: {line["step"]: _float32(line[name]) for line in _lines(tmp_path)} for name in ("loss", "lr")}
    assert list(expected["loss"]) == [1, 2, *later]
    assert _board(tmp_path / "tb") == expected


def test_console_line_shows_what_was_measured_and_nothing_else():
    values = {"loss_mean": 2.5, "loss": 2.34567, "grad_norm": 0.5, "lr": 3e-4, "peak_memory_gib": 1.5}
    line = "step   7/100  mean loss 2.5000  loss 2.3457  grad norm 0.500  lr 3.00e-04  memory 1.50 GiB"
    assert console_line(7, 100, values) == line
    without = {"loss_mean": None, "loss": None, "grad_norm": math.inf}  # no labels
    assert console_line(7, 100, without) == "step   7/100  mean loss n/a  loss n/a  grad norm not finite"
    values |= {"tokens_per_second": 12345.6, "data_wait_fraction": 0.012, "save_seconds": 1.234}
    values |= {"mfu_causal": 0.4, "mfu_palm": 0.45}
    line = console_line(7, 100, values)
    assert all(
        part in line for part in ("12,346 tokens/s", "data wait 1.2%", "MFU 40.0% causal", "MFU 45.0% PaLM", "save 1.23 s")
    )


BEGINNING = Progress(0, Timeline([]))


def test_the_mean_loss_is_over_the_finite_losses_since_the_last_multiple_wherever_readings_fall():
    losses = [5.0, 4.0, math.nan, 3.0, 2.5, math.inf, math.nan, math.nan, 2.0, 1.0]
    steps = [StepRecord(number, 0, loss, 1.0) for number, loss in enumerate(losses, 1)]
    expected = {1: 5.0, 2: 4.5, 3: 4.5, 4: 4.0, 5: 2.5, 8: 2.5, 9: 2.0, 10: 1.5}
    for step, mean in expected.items():
        for cut in range(step + 1):
            read = BEGINNING.with_losses(steps[:cut], 4).with_losses(steps[cut:step], 4)
            assert read.loss_mean == mean
    assert BEGINNING.with_losses(steps[5:8], 10).loss_mean is None
    assert BEGINNING.loss_mean is None
