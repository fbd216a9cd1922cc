"""`titanlite plan --calibrate` writes an entry that `plan` reads; no test asserts measured values."""

import json
import sys
from pathlib import Path

import pytest

from titanlite.config.read import read_config
from titanlite.ground.errors import UserError
from titanlite.plan.calibrate import Measured, _link
from titanlite.plan.time import Device, Job, device_named, ring, shipped_as
from titanlite.tools import plan as tool
from titanlite.tools.plan import read_job

ENTRY = Device(
    bf16_tflops=0.4,
    float32_tflops=0.1,
    fp8_tflops=0.0,
    memory_gib=8.0,
    memory_gb_per_second=60.0,
    nvlink_gb_per_second=4.0,
    network_gb_per_second=0.0,
    sms=1,
    matmul=1.0,
    attention=0.3,
    launch_microseconds=3.0,
    hop_microseconds=50.0,
    cpu_ranks=2,
)
FLOAT32 = ["--training.mixed_precision_param", "float32", "--training.global_batch_size", "4"]


def written(folder, entry: Device):
    file = folder / "device.toml"
    file.write_text("\n".join(["[mine]", *(f"{key} = {json.dumps(value)}" for key, value in entry.model_dump().items())]))
    return str(file)


def job(device: str, *words: str) -> Job:
    return read_job(read_config("train_configs/llama_debug.toml", list(words)), list(words), device, 8)


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    tool.main()


@pytest.mark.slow
def test_two_ranks_measure_an_entry_with_which_plan_finds_a_mesh(tmp_path, monkeypatch, capsys):
    file = str(tmp_path / "cpu.toml")
    run(monkeypatch, "--calibrate", file, "--ranks", "2", "--minutes", "0.01")
    measured = device_named(file)
    assert measured.cpu_ranks == 2 and measured.nvlink_gb_per_second > 0 and measured.float32_tflops > 0
    assert "reduce-scatter of 4,096 bytes" in capsys.readouterr().out
    run(monkeypatch, "train_configs/llama_debug.toml", "--gpus", "2", "--device", file, "--top", "1", *FLOAT32)
    assert "error: unknown" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"measured with 2 ranks.*--ranks 1"):
        run(monkeypatch, "train_configs/llama_debug.toml", "--device", file, *FLOAT32)
    with pytest.raises(UserError, match="exists"):
        run(monkeypatch, "--calibrate", file)


def test_links_are_recovered_from_the_times_of_collectives(tmp_path):
    four = job(written(tmp_path, ENTRY), *FLOAT32)

    def table(size: int) -> list[Measured]:
        return [Measured("", often * ring(four, 4, 1, size), size) for often in (0.5, 3, 2)]

    bandwidth, latency = _link(table(4096) + table(2**24), 4)
    assert bandwidth == pytest.approx(4.0, rel=0.02) and latency == pytest.approx(50e-6, rel=0.05)


def test_several_gpus_are_refused_where_their_links_are_unknown(tmp_path, monkeypatch):
    alone = ENTRY.model_copy(update={"cpu_ranks": 0, "nvlink_gb_per_second": 0.0})
    with pytest.raises(UserError, match="nvlink_gb_per_second"):
        run(monkeypatch, "train_configs/llama_debug.toml", "--gpus", "2", "--device", written(tmp_path, alone), *FLOAT32)
    linked = ENTRY.model_copy(update={"cpu_ranks": 0})
    linked.check("mine", 8, 8)
    with pytest.raises(UserError, match="network_gb_per_second"):
        linked.check("mine", 16, 8)


def test_a_gpu_has_the_links_of_its_shipped_entry_and_not_those_of_its_pcie_version():
    assert (shipped_as("NVIDIA A100-SXM4-80GB"), shipped_as("NVIDIA H100 PCIe")) == ("a100", None)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--calibrate", "new.toml", "--gpus", "2"], "--gpus"),
        (["--calibrate", "new.json"], r"new\.json"),
        (["train_configs/llama_debug.toml", "--minutes", "2"], "--minutes"),
        (["train_configs/llama_debug.toml", "--device", "nowhere.toml", *FLOAT32], r"nowhere\.toml"),
    ],
)
def test_options_without_effect_or_missing_are_named(words, named, monkeypatch):
    with pytest.raises(UserError, match=named):
        run(monkeypatch, *words)


def test_a_file_for_a_device_has_one_table(tmp_path):
    path = Path(written(tmp_path, ENTRY))
    path.write_text("\n".join([path.read_text(), path.read_text().replace("[mine]", "[other]")]))
    with pytest.raises(UserError, match="2 tables"):
        device_named(str(path))
