"""A pipeline stage that allocates the buffers of a microbatch only when they are needed.

PyTorch's stages allocate buffers for the hidden states and the gradients of every microbatch of a step before it begins: for
405B on 512 GPUs, with 256 microbatches, 16 GiB a rank. With "1F1B", only a few microbatches are in flight at a time.

PyTorch's schedules compute the loss after the last forward pass. titanlite's head computes gradients with it, the weight's in
float32: for 8B, 2 GiB for each microbatch in flight. So the loss is computed when the backward pass begins.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

_META = torch.device("meta")  # tensors without memory


class LateStage(PipelineStage):
    """PyTorch's stage with late buffers and a late loss. It gives its module the number of the microbatch.

    Each pass is a named range of profiler traces; only some of PyTorch's schedules name them, and "1F1B" does not. Errors of
    the model are raised unchanged.
    """

    loss_of: Callable[[Tensor, int], Tensor]  # of the last stage's hidden states, (batch, seq, dim), and their microbatch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # Not as an input: FSDP2 would copy a tensor to the device, where reading it is a host sync; 2.11 takes tensors only.
        self.submod.microbatch = fwd_chunk_id  # type: ignore[assignment]  # the attribute of Stage
        with record_function(f"stage {self.stage_index} forward, microbatch {fwd_chunk_id}"):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                wrapped = error
            raise wrapped.__cause__ or wrapped  # PyTorch's error has neither the class nor the message of its cause

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        # a first call without backward passes has made buffers that require no gradient, which PyTorch 2.11 would keep
        _replace(self.args_recv_info[fwd_chunk_id], self.device, requires_grad=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            _replace(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any) -> None:
        with record_function(f"stage {self.stage_index} backward, microbatch {bwd_chunk_id}"):
            if self.has_backward and self.is_last:
                (hidden,), _ = self.fwd_cache[bwd_chunk_id]
                loss = self.loss_of(hidden, bwd_chunk_id)
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if self.has_backward and not self.is_first:
            pairs = zip(self.bwd_cache[bwd_chunk_id], self.args_recv_info[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(_message(grad, info.buffer) for grad, info in pairs)
        if self.has_backward:
            _replace([*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]], _META)

    def clear(self) -> None:
        """Frees the buffers that a step without backward passes leaves."""
        self.clear_runtime_states()
        _replace((info for infos in self.args_recv_info.values() for info in infos), _META)

    def _prepare_forward_infra(self, *args: Any, **named: Any) -> Any:
        return self._on_meta(super()._prepare_forward_infra, *args, **named)

    def _prepare_backward_infra(self, *args: Any, **named: Any) -> Any:
        return self._on_meta(super()._prepare_backward_infra, *args, **named)

    def _on_meta(self, prepare: Any, *args: Any, **named: Any) -> Any:
        """Prepares buffers on the meta device. Shapes are known, so PyTorch makes nothing else on the device."""
        device, self.device = self.device, _META
        try:
            return prepare(*args, **named)
        finally:
            self.device = device


def _message(grad: Tensor | None, received: Tensor | None) -> Tensor | None:
    """The gradient of what was received, as it is sent back: zeros where nothing used it, which PyTorch 2.11 would refuse."""
    if grad is None:
        return torch.zeros_like(received) if received is not None and received.requires_grad else None
    return grad.contiguous()


def _replace(infos: Iterable[Any], device: torch.device, requires_grad: bool = False) -> None:
    """Replaces buffers by empty ones on `device`. Inputs of the first stage have none, in PyTorch 2.11 not even the name."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and buffer.device.type != device.type:
            info.buffer = torch.empty_like(buffer, device=device, requires_grad=requires_grad and buffer.is_floating_point())
