"""The memory of a rank by kind, and the message when it runs out."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from titanlite.config.schema import Config
from titanlite.ground import errors
from titanlite.loop import memory as memory_module
from titanlite.loop.distillation import Teacher
from titanlite.loop.memory import Memory, OutOfMemory, capacity, held_memory
from titanlite.loop.metrics import Clock
from titanlite.loop.remedies import remedies
from titanlite.optim.ema import attach
from titanlite.registry.family import family_of

CPU = torch.device("cpu")
GIB = 2**30


def configuration(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """5 x 3 weights, 5 biases, and their optimizer."""
    model = nn.Linear(3, 5)
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)


def held(parameters: int, gradients: int, state: int) -> dict[str, int]:
    return {"parameters": parameters, "gradients": gradients, "optimizer state": state}


def test_bytes_are_counted_by_kind():
    model, optimizer = small_model()
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 0, 0)
    model(torch.ones(2, 3)).sum().backward()
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 20 * 4, 0)
    optimizer.step()  # two moments of every value, and a float32 step count of each parameter
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 20 * 4, 2 * 20 * 4 + 2 * 4)
    optimizer.zero_grad()
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 0, 2 * 20 * 4 + 2 * 4)


def test_an_ema_and_a_teacher_are_counted_too():
    model, optimizer = small_model()
    attach(optimizer, 0.9)
    model.teacher = Teacher(nn.Linear(3, 7))
    assert held_memory(model, optimizer, CPU) == held(20 * 4, 0, 0) | {"EMA": 20 * 4, "teacher": 28 * 4}


def test_the_rest_of_the_allocated_memory_is_activations(monkeypatch):
    monkeypatch.setattr("titanlite.loop.memory.bytes_on", lambda device, tensors: GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GIB)
    rest = {"activations and all else": 7 * GIB, "reserved but unused": 2 * GIB}
    assert held_memory(*small_model(), torch.device("cuda")) == held(GIB, GIB, GIB) | rest


AC, BATCH, SHARD = "activation_checkpoint.mode", "training.local_batch_size", "parallelism.data_parallel_shard_degree"
CHUNKS, HOST = "activation_checkpoint.sequence_chunks = 8", "activation_checkpoint.offload = true"
NARROW, OFFLOAD = 'training.dtype = "bfloat16"', "parallelism.cpu_offload = true"
MORE = "on more GPUs"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [f'{AC} = "selective"', f"{BATCH} = 4 with training.global_batch_size = 16", NARROW, OFFLOAD]),
        ({"activation_checkpoint": {"mode": "full"}}, [BATCH, CHUNKS, HOST, NARROW, SHARD]),
        ({"training": {"local_batch_size": 1, "dtype": "bfloat16"}}, [AC, SHARD]),
        ({"parallelism": {"data_parallel_replicate_degree": 2}}, [AC, BATCH, NARROW, "replicate_degree = 1 with", SHARD]),
        ({"optimizer": {"name": "torch.optim:RAdam"}}, [AC, BATCH, OFFLOAD]),
        ({"optimizer": {"name": "Muon"}, "activation_checkpoint": {"mode": "full"}}, [BATCH, CHUNKS, HOST, NARROW, MORE]),
        ({"parallelism": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}}, [AC, BATCH, NARROW, MORE]),
        # no SwiGLU that could compute in parts; 4 tokens for 8 parts
        ({"model": {"name": "mixtral"}, "activation_checkpoint": {"mode": "full"}}, [BATCH, HOST, NARROW, OFFLOAD]),
        ({"training": {"seq_len": 4}, "activation_checkpoint": {"mode": "full"}}, [BATCH, HOST, NARROW, OFFLOAD]),
    ],
)
def test_remedies_name_only_features_not_in_use_that_a_run_accepts(sections, expected):
    config = configuration(**sections)
    found = remedies(config, 16, cuda=True, model=family_of(config.model).on_meta())
    assert len(found) == len(expected), found
    assert [part for part, line in zip(expected, found, strict=True) if part not in line] == []
    assert (OFFLOAD in found[-1]) == (expected[-1] != MORE)


def test_no_remedy_of_a_run_on_cpus_moves_to_them_what_they_hold():
    config = configuration(activation_checkpoint={"mode": "full"})
    found = remedies(config, 16, cuda=False, model=family_of(config.model).on_meta())
    assert len(found) == 4 and not any("offload" in line for line in found), found


@pytest.fixture
def memory(monkeypatch) -> Memory:
    """The memory of rank 3 of 8 before its model is built, on a simulated GPU of 80 GiB with tensors on the CPU."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(errors, "_position", errors._position)
    monkeypatch.setattr(sys, "argv", ["titanlite train", "run.toml", "--job.description", "two words"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB // 2, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 78 * GIB)
    return Memory(configuration(), torch.device("cuda", 3), 16)


def test_of_a_container_no_free_bytes_of_the_whole_machine_are_shown(monkeypatch):
    total, _ = capacity(CPU)
    monkeypatch.setattr(memory_module, "machine_memory", lambda: total // 2)
    assert capacity(CPU) == (total // 2, None)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 3 has a total capacity of ..."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
    RuntimeError("CUDA error: out of memory"),
    OSError(12, "Cannot allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS)
def test_memory_that_runs_out_in_any_phase_of_the_loop_is_explained(memory, error):
    for step, where in ((0, "starting, saving"), (7, "step 7, saving")):
        with pytest.raises(OutOfMemory) as raised, Clock(0.0, memory.explained).phase(step, "saving"):
            raise error
        assert str(raised.value).startswith(f"rank 3, {where}: out of memory")


def test_the_message_has_phase_rank_sizes_remedies_and_the_command_that_predicts(memory):
    memory.model, memory.optimizer = family_of(memory.config.model).on_meta(), small_model()[1]
    with pytest.raises(OutOfMemory) as raised, Clock(0.0, memory.explained).phase(12, "forward and backward"):
        raise ERRORS[0]
    text = str(raised.value)
    assert "20.50 GiB more were requested" in text and "cuda:3 has 80.00 GiB, of which 1.50 GiB are free" in text
    assert "optimizer state 0.00 GiB, activations and all else 70.00 GiB" in text
    assert all(f"{number}. {line}" in text for number, line in enumerate(remedies(memory.config, 16, True, memory.model), 1))
    assert "titanlite estimate run.toml --job.description 'two words' --ranks 8 --device-memory-gib 80" in text


def test_an_allocator_of_the_cpu_that_has_no_memory_is_explained_too():
    with (
        pytest.raises(OutOfMemory, match=f"{2**50} bytes more were requested") as raised,
        Memory(configuration(), CPU, 16).explained(),
    ):
        torch.empty(2**50, dtype=torch.uint8)
    assert "held by this rank: no model yet" in str(raised.value) and "the machine has " in str(raised.value)


def test_other_errors_pass_unchanged(memory):
    for error in (RuntimeError("something else"), ValueError("out of memory"), OSError(2, "No such file")):
        with pytest.raises(type(error)) as raised, memory.explained():
            raise error
        assert raised.value is error
