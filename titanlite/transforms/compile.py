"""torch.compile of the model's parts, and a watch for recompilations."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

from models.head import Head, Kernels
from titanlite.config.schema import Compile
from titanlite.files import cache_folder

log = logging.getLogger(__name__)


def compile_model(model: nn.Module, keys: Compile) -> None:
    """Compiles each block, or all of them with the embedding as one graph, and what the head does with logits.

    It is `forward` that is compiled: FSDP's hooks stay outside, parameter names stay what they are, and since blocks share
    one class, dynamo finds the code of the first for all others. Of the head its norm and its kernels are: the loop over
    chunks and the products stay as they are, so that a chunk's memory is used again and many chunks compile as fast as one.
    """
    # PyTorch's own place for what it has compiled is lost when /tmp is emptied, in a container with each run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    # It tells on every run that checkpointed regions must not write in place, which our blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=keys.backend, fullgraph=True)

    if "model" in keys.components:
        for part in [model] if keys.unit == "model" else model.layers.values():
            part.forward = compiled(part.forward)
    if "loss" not in keys.components or model.head is None:
        return
    if isinstance(model.head, Head):
        model.head.norm.forward = compiled(model.head.norm.forward)
        model.head.kernels = Kernels(*map(compiled, model.head.kernels))
    else:  # of a fork's own making
        model.head.forward = compiled(model.head.forward)


class RecompilationWatch:
    """Counts what dynamo compiles after a run should have settled, and says why."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self.recompilations = 0

    def settle(self) -> None:
        """What has been compiled until now was to be expected."""
        self.expected = counters["stats"]["unique_graphs"]

    def check(self, step: int) -> list[str]:
        """Warns of every compilation since `settle` or the last check, by its cause; -> the causes."""
        new = 0 if self.expected is None else counters["stats"]["unique_graphs"] - self.expected
        if new <= 0:
            return []
        self.recompilations += new
        causes = []
        # with those of a backward pass, which has no code of its own and is compiled with the forward pass, left out
        of_code = [metrics for metrics in get_compilation_metrics() if metrics.co_name is not None]
        for metrics in of_code[-new:]:
            causes.append(metrics.recompile_reason or "another code path")
            log.warning("step %d: recompiled %s (%s); every one costs a step much time", step, metrics.co_name, causes[-1])
        self.settle()
        return causes
