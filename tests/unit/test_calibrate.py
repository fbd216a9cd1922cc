"""`titanlite plan --calibrate` writes an entry that `plan` reads; no test asserts measured values."""

import sys

import pytest
import torch

from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import parse_toml
from titanlite.plan import small_runs
from titanlite.plan.calibrate import Measured, _link, _table, shortest_stretch
from titanlite.plan.job import choice_of
from titanlite.plan.small_runs import uncompiled_job
from titanlite.plan.time import (
    HEAD,
    LINK,
    RECOMPUTE,
    Choice,
    Device,
    Job,
    all_to_all,
    device_named,
    host_seconds,
    memory,
    ring,
    shipped_as,
    step,
)
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
    host_milliseconds={kind: {"dp_shard": 1.0} for kind in (*RECOMPUTE, HEAD)},
)
FLOAT32 = ["--training.mixed_precision_param", "float32", "--training.global_batch_size", "4"]


def written(folder, entry: Device, name="mine"):
    file = folder / "device.toml"
    file.write_text("\n".join(_table(name, entry.model_dump(exclude_defaults=True))))
    return str(file)


def job(device: str, *words: str) -> Job:
    return read_job(read_config("train_configs/llama_debug.toml", list(words)), device, 8)


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    tool.main()


@pytest.mark.slow
def test_two_ranks_measure_an_entry_with_which_plan_finds_a_mesh(tmp_path, monkeypatch, capsys):
    file = str(tmp_path / "cpu.toml")
    run(monkeypatch, "--calibrate", file, "--ranks", "2", "--minutes", "0.01")
    measured = device_named(file)
    assert measured.cpu_ranks == 2 and measured.nvlink_gb_per_second > 0 and measured.float32_tflops > 0
    assert measured.host_milliseconds.keys() == {*RECOMPUTE, HEAD} and measured.host_milliseconds["selective"]["tp"] > 0
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


def test_what_training_adds_to_operations_is_recovered_from_small_runs(monkeypatch):
    """Of a machine that computes more slowly in training, moves many bytes more slowly still, and takes time for Python."""
    changed = {key: getattr(ENTRY, key) / 1.5 for key in ("matmul", "attention", "memory_gb_per_second")}
    host = {"none": 2.0, "selective": 9.0, "full": 5.0, "head": 3.0}
    changed |= {
        "host_milliseconds": {kind: {"dp_shard": each, "dp_replicate": each / 2, "tp": 4 * each} for kind, each in host.items()}
    }
    machine = ENTRY.model_copy(update=changed | {"nvlink_gb_per_second": ENTRY.nvlink_gb_per_second / 3})

    def train(_, config: Config, steps: int) -> tuple[float, float]:
        return step(uncompiled_job(config, machine), choice_of(config, 2)).total, 0.0

    monkeypatch.setattr(small_runs, "train", train)
    found = small_runs.in_training(torch.device("cpu"), ENTRY.model_copy(update={"host_milliseconds": {}}))
    assert found.pop("nvlink_gb_per_second") == pytest.approx(machine.nvlink_gb_per_second, rel=0.2)
    for kind, by_mesh in found.pop("host_milliseconds").items():
        assert by_mesh == pytest.approx(machine.host_milliseconds[kind], rel=0.2), kind
    assert found == pytest.approx({key: changed[key] for key in found}, rel=0.05)


def test_a_cpu_without_what_training_adds_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no host_milliseconds; measure again"):
        ENTRY.model_copy(update={"host_milliseconds": {}}).check("mine", 2, 8)


def test_a_table_of_any_numbers_is_toml():
    values = {"hop_microseconds": 12345.6, "bf16_tflops": 4.3e-6, "of": {"none": {"tp": 1.0}}, "sms": 1}
    assert parse_toml("\n".join(_table("mine", values)))["mine"] == {**values, "hop_microseconds": 12346.0}


def test_on_a_cpu_an_operation_takes_what_it_takes_in_a_stretch_without_other_programs():
    slow, quiet = [0.02, 0.03, 0.004, 0.05], [0.01, 0.012, 0.008, 0.01]  # the shortest one is among the slow ones
    assert shortest_stretch([*quiet, *slow, *quiet, *quiet]) == pytest.approx(0.009)
    assert shortest_stretch([0.3, 0.2]) == 0.2
    assert shortest_stretch([1e-5, 3e-5]) == pytest.approx(2e-5)


def test_several_gpus_are_refused_where_their_links_are_unknown(tmp_path, monkeypatch):
    alone = ENTRY.model_copy(update={"cpu_ranks": 0, "nvlink_gb_per_second": 0.0})
    with pytest.raises(UserError, match="nvlink_gb_per_second"):
        run(monkeypatch, "train_configs/llama_debug.toml", "--gpus", "2", "--device", written(tmp_path, alone), *FLOAT32)
    linked = ENTRY.model_copy(update={"cpu_ranks": 0})
    linked.check("mine", 8, 8)
    with pytest.raises(UserError, match="network_gb_per_second"):
        linked.check("mine", 16, 8)
    network = ENTRY.model_copy(update={"cpu_ranks": 0, "nvlink_gb_per_second": 0.0, "network_gb_per_second": 25.0})
    with pytest.raises(UserError, match="nvlink_gb_per_second"):
        network.check("mine", 16, 8)
    network.check("mine", 2, 1)
    of_one = job(written(tmp_path, network), *FLOAT32)._replace(node=1)  # nodes of one GPU, which use no other link
    assert ring(of_one, 2, 1, 1e9) == pytest.approx(0.5e9 / (25e9 * LINK), rel=0.01) == all_to_all(of_one, 2, 1e9)


def test_a_cpu_hides_no_collectives_and_float32_has_twice_the_bytes(tmp_path):
    on_cpu = job(written(tmp_path, ENTRY), *FLOAT32)
    on_gpu = on_cpu._replace(device=ENTRY.model_copy(update={"cpu_ranks": 0}))
    sharded = Choice(dp_shard=2)
    assert step(on_cpu, sharded).fsdp > step(on_gpu, sharded).fsdp
    short = on_cpu._replace(item=2)
    assert ring(on_cpu, 2, 1, 0.0) > 0 and step(on_cpu, Choice(tp=2)).tp > step(short, Choice(tp=2)).tp
    assert step(on_cpu, sharded).matmuls > 3 * step(short, sharded).matmuls, "bf16_tflops is four times float32_tflops"
    assert host_seconds(on_cpu, sharded) > 0
    assert memory(on_cpu, sharded) > memory(short, sharded)
    assert on_cpu.device.reserve < on_gpu.device.reserve


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 PCIe", None), ("NVIDIA L4", None)],
)
def test_a_gpu_has_the_links_of_its_shipped_entry(name, key):
    assert shipped_as(name) == key


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--calibrate", "new.toml", "--gpus", "2"], "--gpus"),
        (["run.toml", "--calibrate", "new.toml"], "run.toml"),
        (["--calibrate", "new.json"], r"new\.json"),
        (["train_configs/llama_debug.toml", "--minutes", "2"], "--minutes"),
        (["train_configs/llama_debug.toml", "--device", "nowhere.toml", *FLOAT32], r"nowhere\.toml"),
    ],
)
def test_options_without_effect_or_missing_are_named(words, named, monkeypatch):
    with pytest.raises(UserError, match=named):
        run(monkeypatch, *words)


def test_a_file_for_a_device_has_one_table(tmp_path):
    path = tmp_path / "device.toml"
    once = written(tmp_path, ENTRY) and path.read_text(encoding="utf-8")
    path.write_text(once + "\n" + once.replace("[mine", "[other"), encoding="utf-8")
    with pytest.raises(UserError, match="2 tables"):
        device_named(str(path))
