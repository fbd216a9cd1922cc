"""Traces and memory reports of a whole run on several ranks, with sharded parameters."""

import gzip
import json
from typing import Any

import torch
from torch import nn

from tests.distributed.pool import Pool
from tests.distributed.scenarios import config_of, full_run
from titanlite.ground.errors import UserError
from titanlite.loop import step as one_step

HERE = "tests.distributed.test_profiling"
SHARDED = {"dp_shard": 2}


def run_config(folder: str, **profiling: Any):
    return config_of(SHARDED, training={"steps": 7}, profiling=profiling, job={"dump_folder": folder})


def test_every_rank_traces_the_same_steps_with_its_own_operations(pools: dict[int, Pool], tmp_path):
    config = run_config(str(tmp_path), enable_profiling=True, profile_freq=3)
    pools[2].run("tests.distributed.scenarios:full_run", degrees=SHARDED, config=config)
    traces = {path.relative_to(tmp_path / "profile_traces"): path for path in tmp_path.rglob("*.json.gz")}
    assert sorted(map(str, traces)) == [f"step-0000000{step}/rank-{rank}.json.gz" for step in (3, 6) for rank in (0, 1)]
    for name, path in traces.items():
        trace = json.loads(gzip.decompress(path.read_bytes()))
        step, rank = int(name.parts[0][5:]), int(name.name[5])
        assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
        names = [event["name"] for event in trace["traceEvents"]]
        assert [found for found in names if found.startswith("step ")] == [f"step {step}"]
        # the step from its forward pass to the optimizer, including all-gathers of parameters
        assert {"aten::mm", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "aten::_fused_adamw_"} <= set(names)
        assert any(found.startswith("FSDP::all_gather") for found in names)


def test_a_ranks_trace_has_its_stages_operations_for_each_microbatch(pools: dict[int, Pool], tmp_path):
    degrees = {"pp": 2}
    profiling = {"enable_profiling": True, "profile_freq": 3}
    config = config_of(degrees, "tied", 4, training={"steps": 3}, profiling=profiling, job={"dump_folder": str(tmp_path)})
    pools[2].run("tests.distributed.scenarios:full_run", degrees=degrees, config=config)
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((tmp_path / f"profile_traces/step-00000003/rank-{rank}.json.gz").read_bytes()))
        events = {event["name"]: event for event in trace["traceEvents"]}
        passes = [event["name"] for event in sorted(events.values(), key=lambda e: e.get("ts", 0)) if "stage " in event["name"]]
        order = ("forward 0", "backward 0", "forward 1", "backward 1", "forward 2", "backward 2", "forward 3", "backward 3")
        if rank == 0:  # rank 0 is one microbatch ahead
            order = ("forward 0", "forward 1", "backward 0", "forward 2", "backward 1", "forward 3", "backward 2", "backward 3")
        expected = [f"stage {rank} {each.replace(' ', ', microbatch ')}" for each in order]
        assert passes == expected
        assert "aten::mm" in events and "aten::_fused_adamw_" in events


def run_out_of_memory(folder: str, failing_step: int) -> str:
    """The message of a run whose forward pass runs out of memory at a step."""
    calls, forward = 0, one_step.summed_loss

    def failing(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == failing_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return forward(model, tokens)

    one_step.summed_loss = failing
    try:
        full_run(SHARDED, run_config(folder))
    except UserError as error:
        return str(error)
    finally:
        one_step.summed_loss = forward
    return ""


def test_a_run_that_is_out_of_memory_reports_step_bytes_and_remedies(pools: dict[int, Pool], tmp_path):
    for message in pools[2].run(f"{HERE}:run_out_of_memory", folder=str(tmp_path), failing_step=5):
        assert "step 5, forward and backward: out of memory, 2.00 GiB more were requested" in message
        assert "parameters 0.00 GiB" in message
        assert '1. activation_checkpoint.mode = "selective"' in message
        assert "2. training.local_batch_size = 2 with training.global_batch_size = 8" in message
        assert ". a larger parallelism.data_parallel_shard_degree" in message
