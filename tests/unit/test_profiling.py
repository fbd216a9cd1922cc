"""What is known of a run's time and memory: traces of the right steps, bytes by what holds them, remedies when they run out."""

import gzip
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.loop.metrics import Clock
from titanlite.loop.profiling import Watch, bytes_on, held_memory, record_collectives, remedies

CPU = torch.device("cpu")
GIB = 2**30
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA's allocator and kernels can be recorded")


@pytest.fixture(autouse=True)
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def configuration(folder: Path = Path("out"), **sections: dict[str, Any]) -> Config:
    return Config.model_validate({"job": {"dump_folder": str(folder)}, **sections})


def small_model(device: torch.device = CPU) -> tuple[nn.Module, torch.optim.Optimizer]:
    """5 x 3 weights, 5 biases, and their optimizer."""
    model = nn.Linear(3, 5, device=device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)


def watch_of(config: Config, device: torch.device = CPU) -> Watch:
    return Watch(config, device, *small_model(device), global_batch=16, clock=Clock(0.0))


def work(watch: Watch, first: int, last: int) -> None:
    """Steps of a forward and a backward pass, with a mark in each that has its number."""
    for step in range(first, last + 1):
        with watch.step(step), record_function(f"mark {step}"):
            watch.model(torch.ones(2, 3, device=watch.device)).sum().backward()
    watch.close()


def events(trace: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize(
    ("freq", "first", "last", "traced"),
    [
        (3, 1, 7, [3, 6]),
        (4, 1, 3, []),  # ends after the warm-up
        (4, 6, 13, [8, 12]),  # resumed: the steps are the run's, not the program's
        (5, 10, 10, [10]),  # begins with a step that is traced, without a warm-up
    ],
)
def test_every_profile_freq_th_step_is_traced(tmp_path, freq, first, last, traced):
    watch = watch_of(configuration(tmp_path, profiling={"enable_profiling": True, "profile_freq": freq}))
    work(watch, first, last)
    assert written(tmp_path) == [f"profile_traces/step-{step:08d}/rank-0.json.gz" for step in traced]


def test_a_trace_holds_the_operations_of_its_step_and_of_no_other(tmp_path):
    keys = {"enable_profiling": True, "profile_freq": 3, "save_traces_folder": "traces/here"}
    work(watch_of(configuration(tmp_path, profiling=keys)), 1, 7)
    for step in (3, 6):
        found = events(tmp_path / f"traces/here/step-{step:08d}/rank-0.json.gz")
        names = {event["name"] for event in found}
        assert {f"step {step}", "aten::addmm", "aten::mm"} <= names
        assert {name for name in names if name.startswith("mark")} == {f"mark {step}"}
        (product,) = [event for event in found if event["name"] == "aten::addmm"]
        assert product["ph"] == "X" and product["dur"] > 0  # what Chrome calls a complete event
        assert product["args"]["Input Dims"][1:3] == [[2, 3], [3, 5]]


def test_tracing_says_nothing_and_writing_counts_as_a_pause(tmp_path, capfd):
    watch = watch_of(configuration(tmp_path, profiling={"enable_profiling": True, "profile_freq": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work(watch, 1, 7)
    assert watch.clock.totals["profile"] > 0
    if torch.version.cuda is None:  # a build for CUDA says that there is no GPU
        assert capfd.readouterr() == ("", "")


class _Gpu:
    """A device that works on what is queued for it, and a profiler of it, on a clock that steps forward by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.queued, self.calls = 1000.0, 0.0, []
        monkeypatch.setattr("titanlite.loop.metrics.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("titanlite.loop.profiling.profile", lambda **keys: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.finish())

    def finish(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def prepare_trace(self) -> None:
        self.now += 1

    def start_trace(self) -> None:
        self.calls.append(("start", self.queued))

    def stop_trace(self) -> None:
        self.calls.append(("stop", self.queued))
        self.finish()

    def export_chrome_trace(self, path: str) -> None:
        self.now += 2


def test_a_trace_begins_with_an_idle_gpu_and_finishing_its_queue_counts_as_training(tmp_path, monkeypatch):
    gpu, config = _Gpu(monkeypatch), configuration(tmp_path, profiling={"enable_profiling": True, "profile_freq": 3})
    watch = Watch(config, torch.device("cuda"), *small_model(), global_batch=16, clock=Clock(gpu.now))
    for step in range(1, 5):
        with watch.step(step):
            gpu.queued += 10  # seconds of work; the host goes on
    assert gpu.calls == [("start", 0), ("stop", 0)]
    assert watch.clock.totals == {"profile": 1 + 2}
    assert gpu.now == 1000 + 3 * 10 + 1 + 2  # step 4 is still in the queue


def test_nothing_is_written_or_reported_where_nothing_is_asked_for(tmp_path):
    watch = watch_of(configuration(tmp_path, profiling={"profile_freq": 3}))
    work(watch, 1, 7)
    assert written(tmp_path) == []
    assert watch.clock.totals == {}


# ---------------------------------------------------------------------------------------------------------------- memory


def held(parameters: int, gradients: int, state: int) -> dict[str, int]:
    return {"parameters": parameters, "gradients": gradients, "optimizer state": state}


def test_bytes_are_counted_by_what_holds_them():
    model, optimizer = small_model()
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 0, 0)
    model(torch.ones(2, 3)).sum().backward()
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 20 * 4, 0)
    optimizer.step()  # two moments of every value, and a float32 that counts the steps of each parameter
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 20 * 4, 2 * 20 * 4 + 2 * 4)
    optimizer.zero_grad()
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 0, 2 * 20 * 4 + 2 * 4)


def test_tied_parameters_count_once_and_other_precisions_by_their_size():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)}).bfloat16()
    model["head"].weight = model["embed"].weight
    assert held_memory(model, torch.optim.AdamW(model.parameters()), CPU)["parameters"] == 7 * 3 * 2


def test_what_lies_on_another_device_does_not_count():
    assert bytes_on(CPU, [torch.empty(4), torch.empty(4, device="meta"), None]) == 16


def test_the_rest_of_the_allocated_memory_is_activations(monkeypatch):
    monkeypatch.setattr("titanlite.loop.profiling.bytes_on", lambda device, tensors: GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GIB)
    rest = {"activations and all else": 7 * GIB, "reserved but unused": 2 * GIB}
    assert held_memory(*small_model(), torch.device("cuda")) == held(GIB, GIB, GIB) | rest


AC, BATCH, SHARD = "activation_checkpoint.mode", "training.local_batch_size", "parallelism.data_parallel_shard_degree"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [f'{AC} = "selective"', f"{BATCH} = 4 with training.global_batch_size = 16", "parallelism.cpu_offload = true"]),
        ({"activation_checkpoint": {"mode": "selective"}}, [f'{AC} = "full"', BATCH, SHARD]),
        ({"activation_checkpoint": {"mode": "memory_budget"}, "compile": {"enable": True}}, [f'{AC} = "full"', BATCH, SHARD]),
        ({"activation_checkpoint": {"mode": "full"}}, [BATCH, SHARD]),
        ({"training": {"local_batch_size": 9}}, [AC, f"{BATCH} = 3 ", SHARD]),
        ({"training": {"local_batch_size": 1}}, [AC, SHARD]),
        (
            {"parallelism": {"data_parallel_replicate_degree": 2}},
            [AC, BATCH, "or with a smaller data_parallel_replicate_degree"],
        ),
        ({"activation_checkpoint": {"mode": "full"}, "training": {"local_batch_size": 1}}, [SHARD]),
    ],
)
def test_remedies_name_only_what_is_not_in_use_yet(sections, expected):
    found = remedies(configuration(**sections), global_batch=16)
    assert len(found) == len(expected), found
    assert [part for part, line in zip(expected, found, strict=True) if part not in line] == []


def test_cpu_offload_is_not_proposed_twice():
    (*_, last) = remedies(configuration(parallelism={"cpu_offload": True}), global_batch=16)
    assert SHARD in last and "cpu_offload" not in last


@pytest.mark.parametrize("local", [2, 3, 8, 15, 49])
def test_the_smaller_batch_that_is_proposed_divides_the_same_global_batch(local):
    line = next(line for line in remedies(configuration(training={"local_batch_size": local}), 6 * local) if BATCH in line)
    smaller = int(line.split(" with ")[0].split(" = ")[1])
    assert 1 <= smaller < local and (6 * local) % (6 * smaller) == 0


def test_running_out_of_memory_is_told_with_step_bytes_and_remedies():
    watch = watch_of(configuration())
    watch.model(torch.ones(2, 3)).sum().backward()
    text = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which ..."
    with pytest.raises(UserError) as caught, watch.step(12):
        raise torch.OutOfMemoryError(text)
    assert str(caught.value).splitlines() == [
        "step 12: out of memory, 20.50 GiB more were requested",
        "  held by this rank: parameters 0.00 GiB, gradients 0.00 GiB, optimizer state 0.00 GiB",
        "  remedies, the cheapest first:",
        *(f"  {number}. {line}" for number, line in enumerate(remedies(watch.config, 16), 1)),
    ]


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match="something else"), watch_of(configuration()).step(1):
        raise RuntimeError("something else")


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


@pytest.mark.parametrize(("before", "after"), [({}, "0"), ({"TORCH_FR_BUFFER_SIZE": "3"}, "3")])
def test_without_a_buffer_nothing_is_recorded_unless_the_environment_asks(tmp_path, before, after):
    record_collectives(configuration(tmp_path / "out"), before)
    assert before == {"TORCH_FR_BUFFER_SIZE": after}
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------ on a GPU


@needs_cuda
def test_memory_snapshots_are_written_at_the_same_steps_and_when_memory_runs_out(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    watch = watch_of(configuration(tmp_path, profiling={"enable_memory_snapshot": True, "profile_freq": 3}), device)
    for step in range(1, 4):
        with watch.step(step):
            watch.model(torch.ones(2, 3, device=device)).sum().backward()
    with pytest.raises(UserError, match="reserved but unused"), watch.step(4):
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
