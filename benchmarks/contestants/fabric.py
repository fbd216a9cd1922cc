"""Lightning's Fabric around the plain model: its precision, backward pass, clipping and optimizer wrapper."""

from collections.abc import Callable

import lightning
import torch
from torch import Tensor

from benchmarks.contestants.job import Job
from benchmarks.contestants.plain import model_of


def precision_of(job: Job) -> str:
    """Lightning's name of the precision."""
    return {"float32": "32-true", "bfloat16": "bf16-mixed", "bfloat16-pure": "bf16-true"}[job.precision]


def build(job: Job) -> Callable[[Tensor], Tensor]:
    fabric = lightning.Fabric(accelerator=job.device, devices=1, precision=precision_of(job))
    fabric.launch()
    model = model_of(job)
    groups = job.decay_groups(model)
    model = fabric.setup(torch.compile(model) if job.compiled else model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(groups, **job.adamw()))

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for part in tokens:
            loss = model(part[:, :-1], part[:, 1:]) / len(tokens)
            fabric.backward(loss)
            total += loss.detach()
        # with foreach kernels; Fabric's default checks on the host at every step whether the norm is finite
        fabric.clip_gradients(model, optimizer, max_norm=job.max_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
