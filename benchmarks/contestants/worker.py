"""One contestant's process: reads a job and then commands, one JSON object per line, and answers each with one.

It imports only parts of titanlite that need PyTorch and pydantic, so that it runs in a peer's own environment. Only its answers
go to standard output; the output of libraries goes to standard error.
"""

import gc
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants.job import Job, Unfit
from titanlite.launch import children


def main() -> None:
    children.end_with_parent()  # also while it is paused
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        job = Job(**json.loads(sys.stdin.readline()))
        torch.set_num_threads(job.threads)
        module = importlib.import_module(f"benchmarks.contestants.{job.module}")
        answer(did="import", memory=memory(job.device), versions=versions())
        step = module.build(job)
        gc.collect()
        answer(did="build", memory=memory(job.device), recomputed=_recomputed(module, job))
        forget_peak(job.device)  # creating the weights belongs to the benchmark, not to the contestant
        for line in sys.stdin:
            command = json.loads(line)
            answer(did="run", **run(job, step, command["first"], command["steps"]), memory=memory(job.device))
    except Unfit as error:
        answer(did="unfit", reason=str(error))
    except Exception:  # anything that a library raises: the driver reports it
        answer(did="fail", reason=traceback.format_exc())
        raise


def _recomputed(module: Any, job: Job) -> float | None:
    """The share of the blocks' forward pass that is recomputed."""
    return module.recomputed(job) if hasattr(module, "recomputed") else float(job.recompute == "full")


def run(job: Job, step: Callable[[Tensor], Tensor], first: int, steps: int) -> dict[str, Any]:
    """Does steps `first`, `first` + 1, ...; batches are created before, and the host syncs with the device once, at the end."""
    batches = [job.tokens(number).to(job.device) for number in range(first, first + steps)]
    if job.device == "cuda":
        torch.cuda.synchronize()
    begin, worked = time.perf_counter(), time.process_time()
    losses = [step(batch) for batch in batches]
    found = torch.stack([loss.detach().float() for loss in losses]).tolist()
    if job.device == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - worked, "losses": found}


def memory(device: str) -> dict[str, int]:
    """Bytes: resident now and at peak, and on a GPU allocated now and at peak."""
    with open("/proc/self/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file)
    found = {name: int(status[key].split()[0]) * 1024 for name, key in (("resident", "VmRSS"), ("peak_resident", "VmHWM"))}
    if device == "cuda":
        found |= {"allocated": torch.cuda.memory_allocated(), "peak_allocated": torch.cuda.max_memory_allocated()}
    return found


def forget_peak(device: str) -> None:
    """Resets the peaks."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # proc(5): resets VmHWM to VmRSS
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def versions() -> dict[str, str]:
    """The versions of Python and of the imported packages."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    packages = ("torch", "triton", "transformers", "accelerate", "torchtitan", "torchao", "litgpt", "lightning")
    found = {name: importlib.metadata.version(name) for name in packages if name in loaded}
    return {"python": platform.python_version(), **found}


if __name__ == "__main__":
    main()
