"""Results that a block's forward pass and its recomputation share: the choice of experts, and the counts that follow from it.

A recomputation that rounds differently could send a token to another expert, and the host waits for counts. Selective
checkpointing could keep them too, but its modes see every operation: 4 ms a block of the host's time (benchmarks/NOTES.md).
"""

import threading
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

_thread = threading.local()  # autograd recomputes in threads of its own


class Pass:
    """The context of a block's forward pass, or of a recomputation, of which there may be several."""

    def __init__(self, results: list[Tensor], again: bool):
        self.results, self.again = results, again

    def __enter__(self) -> None:
        self.outer, self.left = getattr(_thread, "current", None), iter(self.results)
        _thread.current = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _thread.current = self.outer

    def result_of(self, compute: Callable[[], Tensor]) -> Tensor:
        if self.again:
            return next(self.left)
        self.results.append(compute())
        return self.results[-1]


def passes() -> tuple[Pass, Pass]:
    """A forward pass and its recomputation, as `torch.utils.checkpoint.checkpoint` takes them."""
    results: list[Tensor] = []
    return Pass(results, again=False), Pass(results, again=True)


def once(compute: Callable[[], Tensor]) -> Tensor:
    """The result of `compute`, without gradients; in a recomputation, that of the forward pass. Not in compiled code."""
    if torch.compiler.is_compiling() or getattr(_thread, "current", None) is None:
        return compute()
    current: Pass = _thread.current
    return current.result_of(compute)
