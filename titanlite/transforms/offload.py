"""Offload: the inputs of recomputed blocks are in host memory between forward and backward pass (ALST, arXiv:2506.13996).

Copies have a stream of their own: out while the next block computes, and back while the block after it is recomputed.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A tensor in host memory, and the one that was kept before it, which the backward pass needs next."""

    def __init__(self, host: Tensor, before: "_Kept | None"):
        self.host = host
        self.before = weakref.ref(before) if before is not None else lambda: None  # the graph holds them
        self.fetched: Tensor | None = None


class Offload:
    """Copies the inputs of one model's blocks to pinned host memory, and back."""

    def __init__(self, device: torch.device):
        """device: a GPU."""
        self.device = device
        self._copies = torch.cuda.Stream(device)
        self._last: Callable[[], _Kept | None] = lambda: None

    def around(self, function: Callable[..., Any], checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """checkpoint(function), of torch.utils.checkpoint, which keeps nothing but positional arguments by these hooks."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            count, names = len(args), tuple(kwargs)  # `run` is kept, and must keep no argument

            def run(*given: Any) -> Any:
                return function(*given[:count], **dict(zip(names, given[count:], strict=True)))

            with saved_tensors_hooks(self._keep, self._give_back):
                return checkpoint(run, *args, *kwargs.values())

        return forward

    def _keep(self, x: Tensor) -> "Tensor | _Kept":
        if x.numel() == 0:  # PyTorch's own, which marks the checkpoint
            return x
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with torch.cuda.stream(self._copies):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._copies)  # its memory is not used again before it has been copied
        kept = _Kept(host, self._last())
        self._last = weakref.ref(kept)
        return kept

    def _give_back(self, kept: "Tensor | _Kept") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        x = self._fetch(kept)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._copies)
        x.record_stream(current)
        if (before := kept.before()) is not None:
            self._fetch(before)
        kept.fetched = None
        return x

    def _fetch(self, kept: _Kept) -> Tensor:
        """Begins to copy a tensor back, unless that has begun."""
        if kept.fetched is None:
            with torch.cuda.stream(self._copies):
                kept.fetched = kept.host.to(self.device, non_blocking=True)
        return kept.fetched
