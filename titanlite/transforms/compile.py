"""torch.compile of the model's parts, and detection of recompilations."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from models.decoder import Decoder
from models.further import blocks_of
from models.head import Head, Kernels
from titanlite.config.schema import Compile, Config
from titanlite.ground import torch_private
from titanlite.ground.errors import MachineFault, UserError
from titanlite.ground.files import cache_folder

log = logging.getLogger(__name__)


def compile_model(model: Decoder, cfg: Compile) -> None:
    """Compiles each block, and the head's norm and kernels.

    Only `forward` is compiled: FSDP's hooks stay outside, parameter names do not change, and since blocks share one class,
    dynamo reuses the code of the first block. The head's loop over chunks and its matmuls stay eager, so that a chunk's memory
    is reused and many chunks compile as fast as one.
    """
    # PyTorch's default cache is in /tmp, which a container loses with each run. But several nodes share the home folder, where
    # all their ranks would write the same files through a network.
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == int(os.environ.get("LOCAL_WORLD_SIZE", world)):
        with contextlib.suppress(OSError, UserError):  # there is none that can be written: PyTorch's default
            (folder := cache_folder() / "inductor").mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # It warns on every run that checkpointed regions must not write in place; our blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend=cfg.backend, fullgraph=True)

    if "model" in cfg.components:
        for block in blocks_of(model):
            block.forward = compiled(block.forward)
    if "loss" not in cfg.components or model.head is None:
        return
    if isinstance(model.head, Head):
        model.head.norm.forward = compiled(model.head.norm.forward)
        model.head.kernels = Kernels(*map(compiled, model.head.kernels))
        if model.head.loss is not None:  # a user's code, which may hold what dynamo cannot trace
            model.head.loss = torch.compile(model.head.loss, backend=cfg.backend)
    else:  # a fork's own
        model.head.forward = compiled(model.head.forward)


class RecompilationWatch:
    """Counts the compilations after `settle`, with their causes."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self.recompilations = 0

    def settle(self) -> None:
        """Everything compiled so far was expected."""
        self.expected = torch_private.compile_counters["stats"]["unique_graphs"]

    def report(self, cfg: Compile) -> dict[str, int]:
        """For the metrics, where anything is compiled."""
        return {"recompilations": self.recompilations} if cfg.enable else {}

    def check(self, step: int) -> list[str]:
        """Warns of every compilation since `settle` or the last check; returns their causes."""
        new = 0 if self.expected is None else torch_private.compile_counters["stats"]["unique_graphs"] - self.expected
        if new <= 0:
            return []
        self.recompilations += new
        causes = []
        # without those of a backward pass, which has no code of its own and is compiled with its forward pass
        of_code = [metrics for metrics in torch_private.get_compilation_metrics() if metrics.co_name is not None]
        for metrics in of_code[-new:]:
            causes.append(metrics.recompile_reason or "another code path")
            log.warning("step %d: recompiled %s (%s); each costs much of a step", step, metrics.co_name, causes[-1])
        self.settle()
        return causes


def faults(config: Config) -> Iterator[str]:
    """A backend that does not exist, or that this machine cannot run."""
    cfg = config.compile
    if not cfg.enable:
        return
    if cfg.backend not in torch.compiler.list_backends(exclude_tags=()):
        yield f'compile.backend = "{cfg.backend}": no such backend; there are: {", ".join(torch.compiler.list_backends())}'
    elif cfg.backend == "inductor" and not torch.cuda.is_available():
        yield from compiler_faults('compile.backend = "inductor":', "compile.enable = false")


def compiler_faults(what: str, instead: str) -> Iterator[str]:
    """A fault if inductor has no compiler for `what` on the CPU. instead: the setting that needs none."""
    if not has_compiler():
        yield MachineFault(f"{what} needs a C++ compiler on a CPU, and finds none; install g++ or clang, or set {instead}")


def has_compiler() -> bool:
    """Whether inductor finds a C++ compiler, by its own rules."""
    from titanlite.ground.torch_private import InvalidCxxCompiler, get_cpp_compiler  # imports much, and is seldom needed

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False
