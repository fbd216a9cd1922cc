"""Not a trainer: large matmuls in the run's precision, whose rate is an upper bound for the others."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contestants.job import Job

SIZE = {"cpu": 2048, "cuda": 8192}  # n of the n x n matrices
PRODUCTS = {"cpu": 1, "cuda": 50}  # per step; enough for a GPU's clock to settle


def flops(device: str) -> float:
    """Floating-point operations of one step."""
    return PRODUCTS[device] * 2.0 * SIZE[device] ** 3


def build(job: Job) -> Callable[[Tensor], Tensor]:
    size = SIZE[job.device]
    dtype = torch.float32 if job.precision == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(job.seed)
    left, right = (torch.randn(size, size, generator=generator).to(job.device, dtype) for _ in range(2))
    out = torch.empty_like(left)

    def step(tokens: Tensor) -> Tensor:
        for _ in range(PRODUCTS[job.device]):
            torch.mm(left, right, out=out)
        return out[0, 0]

    return step
