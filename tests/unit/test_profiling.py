"""Records of a run's time and memory: traces of the right steps, snapshots, records of collectives."""

import gzip
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.loop.memory import Memory, OutOfMemory
from titanlite.loop.metrics import Clock
from titanlite.loop.profiling import Watch, record_collectives

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA's allocator and kernels can be recorded")


pytestmark = pytest.mark.usefixtures("group_of_file")


def configuration(folder: Path = Path("out"), **sections: dict[str, Any]) -> Config:
    return Config.model_validate({"job": {"dump_folder": str(folder)}, **sections})


def watch_of(config: Config, device: torch.device = CPU) -> Watch:
    return Watch(config, device, Clock(0.0))


def with_snapshots(config: Config, device: torch.device) -> tuple[Clock, Watch]:
    """As the loop makes them."""
    clock = Clock(0.0, Memory(config, device, 16).explained)
    return clock, Watch(config, device, clock)


def work(watch: Watch, first: int, last: int) -> None:
    """Steps of a forward and a backward pass, each with a mark that has its number."""
    model = nn.Linear(3, 5, device=watch.device)
    for step in range(first, last + 1):
        with watch.step(step), record_function(f"mark {step}"):
            model(torch.ones(2, 3, device=watch.device)).sum().backward()
    watch.close()


def events(trace: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------------------------------------------------- traces


def test_tracing_prints_nothing_and_writing_counts_as_a_pause(tmp_path, capfd):
    watch = watch_of(configuration(tmp_path, profiling={"enable_profiling": True, "profile_freq": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work(watch, 1, 7)
    assert watch.clock.totals["profile"] > 0
    if torch.version.cuda is None:  # a build for CUDA says that there is no GPU
        assert capfd.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------------------- collectives


def test_the_flight_recorder_writes_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment: dict[str, str] = {"TORCH_FR_BUFFER_SIZE": "3"}
    record_collectives(configuration(Path("out"), comm={"trace_buf_size": 500}), environment)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "500",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "out/comm_traces/rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert (tmp_path / "out/comm_traces").is_dir()


def test_without_a_buffer_nothing_is_recorded(tmp_path):
    environment: dict[str, str] = {}
    record_collectives(configuration(tmp_path / "out"), environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": "0"} and not (tmp_path / "out").exists()


def test_a_snapshot_is_written_in_any_phase_that_runs_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_private, "record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch_private, "dump_snapshot", lambda path: Path(path).write_bytes(b""))
    clock, watch = with_snapshots(configuration(tmp_path, profiling={"enable_memory_snapshot": True}), CPU)
    with watch.step(4):
        pass
    with pytest.raises(OutOfMemory), clock.phase(4, "validation"):
        raise MemoryError
    assert written(tmp_path) == ["memory_snapshot/step-00000004-out-of-memory/rank-0.pickle"]


# ------------------------------------------------------------------------------------------------------------ on a GPU


@needs_cuda
def test_memory_snapshots_are_written_at_the_same_steps_and_when_memory_runs_out(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    config = configuration(tmp_path, profiling={"enable_memory_snapshot": True, "profile_freq": 3})
    (clock, watch), model = with_snapshots(config, device), nn.Linear(3, 5, device=device)
    for step in range(1, 4):
        with watch.step(step):
            model(torch.ones(2, 3, device=device)).sum().backward()
    with pytest.raises(OutOfMemory, match="reserved but unused"), watch.step(4), clock.phase(4, "forward and backward"):
        torch.empty(2**50, device=device)
    watch.close()
    folders = ["memory_snapshot/step-00000003", "memory_snapshot/step-00000004-out-of-memory"]
    assert written(tmp_path) == [f"{folder}/rank-0.pickle" for folder in folders]
    for path in written(tmp_path):
        assert {"segments", "device_traces"} <= pickle.loads((tmp_path / path).read_bytes()).keys()


@needs_cuda
def test_a_trace_on_a_gpu_shows_its_kernels(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    work(watch_of(configuration(tmp_path, profiling={"enable_profiling": True, "profile_freq": 3}), device), 1, 3)
    found = events(tmp_path / "profile_traces/step-00000003/rank-0.json.gz")
    assert any(event.get("cat") == "kernel" for event in found)
