"""Faults that only a GPU would show, each planted in a cell."""

import itertools
from typing import Any, NamedTuple

import torch

from models import all_to_all, llama3
from tests.cuda_shim import pretend
from titanlite.data.batch import Batch
from titanlite.loop import step
from titanlite.parallel import pipeline
from titanlite.transforms import attention_kernels

_clip = step.clip_gradients
_MIXTURE = "FSDP 8, EP 4, mixture, nodes"


class Planted(NamedTuple):
    """What is replaced, by what, and in which cell."""

    owner: Any
    name: str
    fault: Any
    cell: str = "1 rank, bfloat16"


def _before_clipping(fault: Any) -> Planted:
    """Gradient clipping, with a fault applied to the gradient of the first parameter."""

    def clip(optimizer: torch.optim.Optimizer, *args: Any) -> torch.Tensor:
        fault(optimizer.param_groups[0]["params"][0].grad)
        return _clip(optimizer, *args)

    return Planted(step, "clip_gradients", clip)


def _mask_on_cpu(seq: Any, *_: Any) -> Any:
    length = seq.positions.shape[1]
    return seq._replace(mask=torch.ones(1, 1, length, length, dtype=torch.bool).tril())


def _attend_on_cpu(gradient: torch.Tensor) -> None:
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[gradient[None, None]] * 3)


_on_host, _receivers = all_to_all._on_host, all_to_all.Hop.of


def _counts_twice(counts: torch.Tensor) -> torch.Tensor:
    _on_host(counts)
    return _on_host(counts)


def _receivers_with_wait(hop: all_to_all.Hop, chosen: torch.Tensor) -> torch.Tensor:
    receivers = _receivers(hop, chosen)
    receivers.to("cpu")
    return receivers


def _sum_on_another_stream(gradient: torch.Tensor) -> None:
    with torch.cuda.stream(pretend.Stream()):
        gradient.sum()


_forward = pipeline.Stage.forward


def _number_on_the_device(stage: pipeline.Stage, x: torch.Tensor) -> torch.Tensor:
    stage.microbatch = int(torch.full((), stage.microbatch, device=pretend.DEVICE))
    return _forward(stage, x)


_counts = itertools.count(2)
_first_rows = torch.compile(lambda matrix, count: matrix[:count] + 1, fullgraph=True)

PLANTED: dict[str, Planted] = {
    "an .item() in the step": _before_clipping(lambda gradient: gradient.sum().item()),
    "a bool index": _before_clipping(lambda gradient: gradient[gradient > 0]),
    "a tensor made of numbers": _before_clipping(lambda gradient: torch.tensor([1.0, 2.0], device=gradient.device)),
    "a wait for the device": _before_clipping(lambda gradient: torch.cuda.synchronize()),
    "a float64 kernel": _before_clipping(lambda gradient: gradient.double()),
    "a kernel that CUDA lacks": _before_clipping(_attend_on_cpu),
    "a recompilation": _before_clipping(lambda gradient: _first_rows(gradient, next(_counts))),
    "a slow kernel of attention": Planted(attention_kernels, "_ORDER_ON_HOPPER", ("math",)),
    "a mask on the CPU": Planted(llama3, "with_mask", _mask_on_cpu),
    "a pageable copy": Planted(Batch, "pin_memory", lambda batch: batch),
    "another copy of counts in the exchange": Planted(all_to_all, "_on_host", _counts_twice, _MIXTURE),
    "a copy of counts outside of the exchange": Planted(all_to_all.Hop, "of", _receivers_with_wait, _MIXTURE),
    "a microbatch's number on the device": Planted(
        pipeline.Stage, "forward", _number_on_the_device, "PP 2 x FSDP 4, Interleaved1F1B, last rank, bfloat16"
    ),
    "a stream that does not wait": _before_clipping(_sum_on_another_stream),
}
