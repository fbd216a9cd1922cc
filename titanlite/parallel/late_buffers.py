"""A stage of a pipeline that allocates late: what a microbatch does not need yet does not exist.

PyTorch's stages allocate buffers for the hidden states and the gradients of every microbatch of a step before it begins: for
405B on 512 GPUs, with 256 microbatches, 16 GiB a rank. In its "1F1B" few microbatches are between their passes at a time.

PyTorch's schedules compute the loss after the last forward pass. titanlite's head computes gradients with it, the weight's in
float32: for 8B, 2 GiB for each microbatch that waits for its backward pass. So the loss is computed when that begins.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class LateBuffersStage(PipelineStage):
    """A stage of PyTorch's, with such buffers and such a loss, whose module knows the microbatch."""

    loss_of: Callable[[Tensor, int], Tensor]  # of the last stage's hidden states, (batch, seq, dim), and their microbatch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # No input: FSDP2 copies tensors to the device, where the host would wait to read one; 2.11 takes nothing but tensors.
        self.submod.microbatch = fwd_chunk_id  # type: ignore[assignment]  # the attribute of Stage
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any) -> None:
        if self.has_backward and self.is_last:
            (hidden,), _ = self.fwd_cache[bwd_chunk_id]
            loss = self.loss_of(hidden, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if self.has_backward:
            self._free([*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]])

    def clear(self) -> None:
        """Frees what a step without backward passes has left."""
        self.clear_runtime_states()
        self._free(info for infos in self.args_recv_info.values() for info in infos)

    def _setup_forward_recv_info(self, *args: Any) -> None:
        self._on_meta(super()._setup_forward_recv_info, *args)

    def _setup_backward_recv_info(self, *args: Any) -> None:
        self._on_meta(super()._setup_backward_recv_info, *args)

    def _on_meta(self, set_up: Any, *args: Any) -> None:
        device, self.device = self.device, torch.device("meta")
        try:
            set_up(*args)
        finally:
            self.device = device

    def _allocate(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is not None and info.buffer.is_meta:
                info.buffer = torch.empty_like(info.buffer, device=self.device)

    def _free(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta")
