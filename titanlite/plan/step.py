"""Parts of a training step on pretended ranks: FakeTensorMode tensors, which have no memory, and a fake process group.

The modules, hooks and functions are those of a run. Tensors are on the CPU, so the attention and norm kernels are a CPU's; the
loss is computed in chunks of the size that CUDA uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.decoder import Decoder
from models.head import SIZES, Head
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.loop.step import forward_backward, update
from titanlite.optim import rounding
from titanlite.optim.build import build_optimizer
from titanlite.parallel.fsdp import Deferred
from titanlite.parallel.parallelize import parallelize
from titanlite.plan.record import Allocations, Recorder, Work, combine, mesh_slices
from titanlite.transforms import float8
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.registry import Family, tie
from titanlite.transforms.shards import local_part


@contextmanager
def pretended_ranks(ranks: int) -> Iterator[None]:
    """A process group in which this process is rank 0 of `ranks`, and the others never answer. There must be none before."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Setup(NamedTuple):
    """What all steps of a prediction share."""

    family: Family
    config: Config
    mesh: DeviceMesh
    device_type: str  # the device whose chunk sizes the loss uses


def measure_memory(setup: Setup, depth: int) -> tuple[list[int], int]:
    """(bytes allocated when each of the first `depth` layers begins, bytes allocated at the peak) of one microbatch.

    Both are on top of masters and gradients. The second of two steps is measured: gradients are there already.
    """
    model, allocations = _first_layers(setup, depth), Allocations()
    entered: list[int] = []
    before = 0
    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda *_: entered.append(allocations.live() - before))
    with FakeTensorMode(allow_non_fake_inputs=True), allocations:
        _materialize(model)
        for _ in range(2):
            entered.clear()
            before = allocations.peak = allocations.live()
            _forward_backward(model, setup, 1)
    return entered, allocations.peak - before


def measure_work(setup: Setup, depth: int, microbatches: int) -> Work:
    """What the forward and backward passes of a step of the first `depth` layers compute and send.

    Two microbatches are run: all but the last one of a step are equal.
    """
    model, recorder = _first_layers(setup, depth), Recorder(mesh_slices(setup.mesh))
    begun: list[Work] = []  # what had been recorded when each microbatch began
    model.register_forward_pre_hook(lambda *_: begun.append(recorder.work()), prepend=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _materialize(model)
        float8.measure_weights(model)  # as the step before has done
        with recorder:
            _forward_backward(model, setup, min(microbatches, 2))
    if microbatches <= 2:
        return recorder.work()
    return combine(lambda first, second, end: end + (microbatches - 2) * (second - first), *begun, recorder.work())


class Update(NamedTuple):
    """What rank 0 holds and does when the optimizer updates all parameters."""

    state: int  # bytes of the optimizer's state, counts of steps apart
    working: int  # bytes allocated at the peak, on top of masters, gradients and state
    work: Work


def measure_update(setup: Setup, depth: int) -> Update:
    """Updates all parameters of the first `depth` layers, embedding and head once."""
    model, config, slices = _first_layers(setup, depth), setup.config, mesh_slices(setup.mesh)
    with FakeTensorMode(allow_non_fake_inputs=True), _without_compiled_kernels():
        _materialize(model)
        optimizer = build_optimizer(model, config.optimizer, DTYPES[config.training.mixed_precision_param])
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        for _ in range(2):  # the second is measured: in the first, DTensor derives placements on whole tensors of its own
            for parameter in trained(model):
                parameter.grad = torch.empty_like(parameter)
            allocations, recorder = Allocations(), Recorder(slices)
            with allocations, recorder:
                update(model, optimizer, config.optimizer.lr, config.training.max_norm)
    return Update(sum(local_bytes(tensor) for tensor in tensors if tensor.ndim), allocations.peak, recorder.work())


@contextmanager
def _without_compiled_kernels() -> Iterator[None]:
    """Optimizers that are built here leave out the kernels that they would compile.

    Such a kernel writes to its arguments, and allocates, multiplies and sends nothing. Uncompiled, its temporaries for the
    embedding and the matrices of an 8B model in bfloat16 would take 77 GiB.
    """
    elementwise = rounding.elementwise
    rounding.elementwise = lambda update, compiled: (lambda *_: None) if compiled else elementwise(update, compiled)
    try:
        yield
    finally:
        rounding.elementwise = elementwise


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that rank 0 holds."""
    return local_part(tensor).numel() * tensor.element_size()


def _first_layers(setup: Setup, depth: int) -> Decoder:
    model = parallelize(setup.family, setup.config, setup.mesh, torch.device("cpu"), depth)
    if isinstance(model.head, Head):
        model.head.sizes = model.head.sizes or SIZES[setup.device_type]
    return model


def _materialize(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    tie(model)


def _forward_backward(model: Decoder, setup: Setup, microbatches: int) -> None:
    training = setup.config.training
    tokens = torch.zeros(microbatches, training.local_batch_size, training.seq_len + 1, dtype=torch.int64)
    forward_backward(model, Batch(tokens), setup.mesh, None, Deferred.of(setup.config))
