"""Buffers for what a stage of a pipeline receives, which exist for as long as a microbatch needs them.

PyTorch's stages allocate one for the hidden states and one for the gradients of every microbatch of a step before it begins:
for 405B on 512 GPUs, with 256 microbatches, 16 GiB a rank. In its "1F1B" few microbatches are between their passes at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import record_function


class LateBuffersStage(PipelineStage):
    """A stage of PyTorch's, with such buffers, ranges in traces, and errors of the model as they are."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._range("forward", fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                wrapped = error
            raise wrapped.__cause__ or wrapped  # PyTorch's own has neither the class nor the words of its cause

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._range("backward" if kwargs.get("full_backward", True) else "backward of inputs", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._free([*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._range("backward of weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _range(self, kind: str, number: int) -> Any:
        """A range of a trace: PyTorch's schedules have names of their own in some, and in "1F1B" none."""
        return record_function(f"stage {self.stage_index} {kind}, microbatch {number}")

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


@contextmanager
def bounded_waits(group: ProcessGroup, device: torch.device) -> Iterator[Callable[[list[Work]], Any]]:
    """PyTorch's schedules wait for messages as long as the group's present timeout says; yields the function that waits.

    gloo waits for a message as long as the timeout was when the group was made. NCCL needs nothing, and would block the host.
    """
    plain = schedules._wait_batch_p2p
    if device.type == "cpu":
        timeout = group._get_backend(device).options._timeout
        schedules._wait_batch_p2p = lambda work: [each.wait(timeout) for each in work]
    try:
        yield schedules._wait_batch_p2p
    finally:
        schedules._wait_batch_p2p = plain
