"""A machine, its versions and the best rates of its GPU, as JSON: python -m benchmarks.gpu.device FILE

A large matmul in bfloat16 and a large copy bound every training run. Without a GPU they are measured on the CPU, the matmul in
float32: a CPU without instructions for bfloat16 has a fiftieth of that rate in it.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import matmul
from benchmarks.contestants.job import Job

_ROUNDS = 5
_COPIED = {"cpu": 2**27, "cuda": 2**32}  # bytes
_PACKAGES = ("torch", "triton", "torchao", "transformers", "accelerate", "torchtitan", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def seconds_of(work: Callable[[], Any], device: str) -> list[float]:
    """Seconds of each repetition, after one to warm up."""
    found = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[1:]


def copy_seconds(device: str) -> list[float]:
    """Seconds of large copies."""
    source = torch.ones(_COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds_of(lambda: target.copy_(source), device)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(device: str) -> dict[str, Any]:
    """The machine, its versions and its rates."""
    copies = copy_seconds(device)
    step = matmul.build(Job(module="matmul", folder="", device=device, precision="bfloat16" if device == "cuda" else "float32"))
    products = seconds_of(lambda: step(torch.empty(0)), device)
    found: dict[str, Any] = {
        "versions": versions(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "matmul_flops": matmul.flops(device) / statistics.median(products),
        "copy_bytes": 2 * _COPIED[device] / statistics.median(copies),  # read and written
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "total_gib": total / 2**30,
            "free_gib": free / 2**30,
        }
    return found


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    Path(sys.argv[1]).write_text(json.dumps(measure(device), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
