"""No trainer: one large matrix product a step, in the run's precision. The rate of it is what the others can reach at most."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contestants.job import Job

SIZE = {"cpu": 2048, "cuda": 8192}  # n of the n x n matrices


def flops(device: str) -> float:
    """Floating-point operations of one product."""
    return 2.0 * SIZE[device] ** 3


def build(job: Job) -> Callable[[Tensor], Tensor]:
    size = SIZE[job.device]
    dtype = torch.float32 if job.precision == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(job.seed)
    left, right = (torch.randn(size, size, generator=generator).to(job.device, dtype) for _ in range(2))
    out = torch.empty_like(left)

    def step(_: Tensor) -> Tensor:
        torch.mm(left, right, out=out)
        return out[0, 0]

    return step
