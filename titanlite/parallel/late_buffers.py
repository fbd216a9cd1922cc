"""Buffers for what a stage of a pipeline receives, which exist for as long as a microbatch needs them.

PyTorch's stages allocate one for the hidden states and one for the gradients of every microbatch of a step before it begins:
for 405B on 512 GPUs, with 256 microbatches, 16 GiB a rank. In its "1F1B" few microbatches are between their passes at a time.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

_META = torch.device("meta")  # tensors without memory


class LateBuffersStage(PipelineStage):
    """A stage of PyTorch's, with such buffers."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        # a first call without a backward pass has made buffers without gradients, which PyTorch 2.11 would keep
        _replace(self.args_recv_info[fwd_chunk_id], self.device, requires_grad=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            _replace(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            _replace([*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]], _META)

    def clear(self) -> None:
        """Frees what a step without backward passes has left."""
        self.clear_runtime_states()
        _replace((info for infos in self.args_recv_info.values() for info in infos), _META)

    def _prepare_forward_infra(self, *args: Any, **named: Any) -> Any:
        return self._on_meta(super()._prepare_forward_infra, *args, **named)

    def _prepare_backward_infra(self, *args: Any, **named: Any) -> Any:
        return self._on_meta(super()._prepare_backward_infra, *args, **named)

    def _on_meta(self, prepare: Any, *args: Any, **named: Any) -> Any:
        """Prepares buffers without memory. Shapes are given, so nothing else is made on the device."""
        device, self.device = self.device, _META
        try:
            return prepare(*args, **named)
        finally:
            self.device = device


def _replace(infos: Iterable[Any], device: torch.device, requires_grad: bool = False) -> None:
    """Gives buffers on another device. Inputs of the first stage have none: None, and in PyTorch 2.11 no such attribute."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and buffer.device.type != device.type:
            info.buffer = torch.empty_like(buffer, device=device, requires_grad=requires_grad)
