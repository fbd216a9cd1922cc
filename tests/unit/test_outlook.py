"""Predicted and measured speed: the named cause, the steps that count, and runs without a prediction."""

import logging
import random

import pytest
import torch

from tests.own.data_runs import full_run
from titanlite.config.schema import Config
from titanlite.loop.metrics import Clock
from titanlite.plan import outlook
from titanlite.plan.job import choice_of, job_of
from titanlite.plan.outlook import Measured, Outlook, Predicted, entry, peak_flops, verdict
from titanlite.plan.search import choices, keys_of
from titanlite.plan.time import Choice, devices, peak_flops_of, step

PREDICTED = Predicted(seconds=1.0, memory=100.0, error=0.2)
DATA, COMPILED, THROTTLED, PAUSED = "waits for data", "compiled again", "throttled to 40%", "such as saves"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (Measured(1.19, 120), ""),
        (Measured(1.0, 130), "more memory than predicted: unexplained"),
        (Measured(1.3, 100), "slower than it could be: unexplained"),
        (Measured(1.19, 100, data_wait=0.5, recompilations=9), ""),
        (Measured(2.0, 100, data_wait=0.3, recompilations=2), DATA),
        (Measured(2.0, 100, data_wait=0.2, recompilations=2), COMPILED),
        (Measured(2.0, 100, clock=0.4), THROTTLED),
        (Measured(2.0, 100, clock=0.8), "unexplained"),
        (Measured(2.0, 100, paused=0.3), PAUSED),
        (Measured(2.0, 100, paused=0.2), "unexplained"),
    ],
)
def test_a_run_slower_than_the_error_allows_logs_the_likely_reason(measured, named):
    text, warned = verdict(PREDICTED, measured)
    assert named in text and warned == bool(named)
    assert sum(cause in text for cause in (DATA, COMPILED, THROTTLED, PAUSED, "unexplained")) == bool(named)


@pytest.mark.parametrize(
    ("name", "found", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989e12),
        ("NVIDIA H100 PCIe", None, 756e12),
        ("NVIDIA L20", None, None),
        ("", None, None),
    ],
)
def test_a_gpu_is_identified_by_the_full_name_of_its_driver(monkeypatch, name, found, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda")
    assert (entry(device), peak_flops(device, "bfloat16"), peak_flops(device, "float32")) == (found, flops, None)
    assert entry(CPU) is peak_flops(CPU, "bfloat16") is None


def test_a_device_has_the_same_peak_for_the_plan_and_for_the_mfu():
    assert all(
        peak_flops_of(known.driver_name) == known.bf16_tflops * 1e12 for known in devices().values() if known.driver_name
    )


def config_of(**sections: object) -> Config:
    given = {"model": {"flavor": "8b"}, "training": {"seq_len": 4096, "local_batch_size": 4, "dtype": "bfloat16"}}
    return Config.model_validate(given | sections)


def logged(caplog, monkeypatch, config: Config, device="h200", active=True) -> list[str]:
    """The lines of a run whose steps take 2 s: all but two of them wait 7 s for a save, and the first ones compile."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(outlook, "entry", lambda _: device)
    caplog.set_level(logging.INFO)
    clock = Clock(0.0)
    found = Outlook(config, CPU, 1, 4, clock, active)
    for number in range(1, 31):
        now += 2 if number > 5 else 30
        found.step()
        if number % 10 == 0:
            found.report({"data_wait_fraction": 0.01, "peak_memory_gib": 116.0}, 0)
        if number > 5 and number not in (10, 11):
            with clock.phase(number, "saving", "save"):
                now += 7
    return [record.message for record in caplog.records]


def test_the_line_has_the_median_of_the_steps_without_pauses(caplog, monkeypatch):
    (line,) = logged(caplog, monkeypatch, config_of())
    seconds = step(job_of(config_of(), "h200", 1, 4), Choice(microbatch=4)).total
    assert line.startswith(f"step time 2 s, predicted {seconds:.3g} s"), line
    assert "such as saves" in line


LEFT_OUT = {
    "Muon's matmuls": {"optimizer": {"name": "Muon"}},
    "copies of activation_checkpoint.offload": {"activation_checkpoint": {"mode": "full", "offload": True}},
    "masks of documents": {"training": {"document_policy": "best_fit", "document_mask": True}},
    "keeps layers in bfloat16": {"float8": {"enable": True, "filter_fqns": ["layers.0.*"]}},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_slow_run_is_no_warning_where_the_prediction_leaves_costs_out(name, monkeypatch):
    sections = config_of().model_dump(exclude_unset=True)
    config = config_of(**{key: sections.get(key, {}) | values for key, values in LEFT_OUT[name].items()})
    predicted = Outlook(config, CPU, 1, 4, Clock(0.0), True)._predicted("h200")
    assert predicted
    text, warned = verdict(predicted, Measured(2 * predicted.seconds, predicted.memory))
    assert name in text and "slower than it could be" not in text and not warned
    text, warned = verdict(predicted, Measured(2 * predicted.seconds, predicted.memory, clock=0.4))
    assert name in text and THROTTLED in text and warned


UNKNOWN = {
    "a device without blind runs of MoE models": {"model": {"name": "mixtral", "flavor": "8x7b"}},
    "adapters": {"lora": {"enable": True}},
    "float32": {"training": {"mixed_precision_param": "float32"}},
    "a memory budget": {"activation_checkpoint": {"mode": "memory_budget"}, "compile": {"enable": True}},
    "weights on the host": {"parallelism": {"cpu_offload": True}},
    "emulated float8": {"float8": {"enable": True, "emulate": True}},
    "a teacher": {"distillation": {"teacher": "folder"}},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_logged_if_the_plan_has_no_known_error(caplog, monkeypatch, name):
    assert logged(caplog, monkeypatch, config_of(**UNKNOWN[name])) == []


def test_other_devices_and_ranks_log_nothing_and_an_unreadable_fork_logs_the_reason(caplog, monkeypatch):
    assert logged(caplog, monkeypatch, config_of(), device=None) == []
    assert logged(caplog, monkeypatch, config_of(), active=False) == []
    monkeypatch.setattr(outlook, "job_of", lambda *_: torch.nn.Module().embed)
    (line,) = logged(caplog, monkeypatch, config_of())
    assert "embed" in line


def test_the_mesh_of_a_configuration_is_what_the_plan_chooses_from():
    config = config_of()
    every = [*choices(job_of(config, "h200", 8, 64), 32)]
    for choice in random.Random(0).sample(every, 100):
        assert choice_of(config.with_keys(keys_of(choice)), 32) == choice


def test_a_run_prints_one_line_after_its_20th_step(caplog, monkeypatch, group_of_one, tmp_path):
    monkeypatch.setattr(outlook, "entry", lambda _: "h200")
    done: list[str] = []
    predict, restart = outlook.job_of, Clock.restart
    monkeypatch.setattr(outlook, "job_of", lambda *args: (done.append("predicted"), predict(*args))[1])
    monkeypatch.setattr(Clock, "restart", lambda clock: (done.append("restarted"), restart(clock))[1])
    caplog.set_level(logging.INFO)
    config = Config.model_validate(
        {
            "job": {"dump_folder": str(tmp_path)},
            "model": {"name": "tests.tiny", "flavor": "plain"},
            "training": {"seq_len": 16, "local_batch_size": 2, "steps": 21},
            "metrics": {"enable_tensorboard": False},
        }
    )
    full_run({}, config)
    messages = [record.message for record in caplog.records]
    (number,) = (number for number, message in enumerate(messages) if message.startswith("step time "))
    assert done[done.index("predicted") :] == ["predicted", "restarted", "restarted"], "what step 20 predicts is no training"
    assert messages[number - 1].startswith("step 20/21 ") and "slower than it could be: " in messages[number]
