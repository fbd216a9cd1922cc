"""Inputs of blocks in host memory: the same gradients, one block prefetched to the device, and nothing left afterwards.

The streams of a GPU are simulated here: every copy ends at once. tests/distributed/test_cuda_shim.py runs the program on a
simulated GPU, and test_cuda.py on a real one.
"""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from titanlite.transforms import offload
from titanlite.transforms.activation_checkpoint import checkpoint_blocks
from titanlite.transforms.offload import Offload

CPU = torch.device("cpu")


class Stream:
    """A stream that has nothing to wait for."""

    def __init__(self, device: torch.device):
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass


@pytest.fixture(autouse=True)
def host_copies(monkeypatch) -> list[weakref.ref]:
    """A device whose copies to the host end at once; returns the copies."""
    made: list[weakref.ref] = []
    empty = torch.empty

    def noted(*shape, pin_memory: bool = False, **options) -> Tensor:
        tensor = empty(*shape, **options)
        if pin_memory:
            made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(offload.torch, "empty", noted)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return made


class Layers(nn.Module):
    """Four blocks of a matmul and a nonlinearity."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers.values()
        x = first(input=x)  # a fork may call its blocks with keyword arguments
        for block in others:
            x = block(x)
        return x.square().sum()


def gradients(model: Layers, times: int = 1) -> list[Tensor]:
    for number in range(times):
        model(torch.linspace(-1, number + 1, 24).view(3, 8)).backward()
    return [parameter.grad for parameter in model.parameters()]


def offloaded() -> Layers:
    model = Layers()
    checkpoint_blocks(model, 1, Offload(CPU))
    return model


def test_gradients_equal_those_without_offloading_bit_for_bit_for_several_microbatches(host_copies):
    assert all(map(torch.equal, gradients(offloaded(), 3), gradients(Layers(), 3)))
    assert len(host_copies) == 3 * 4


def test_between_the_passes_no_input_of_a_block_is_on_the_device():
    model, inputs = offloaded(), []
    for number in range(1, 4):  # the first block's input is the caller's
        model.layers[str(number)].register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(torch.linspace(-1, 1, 24).view(3, 8))
    gc.collect()
    assert len(inputs) == 3 and not [ref for ref in inputs if ref() is not None]
    loss.backward()


def test_a_forward_pass_without_a_backward_pass_leaves_nothing_and_disturbs_no_later_one(host_copies):
    model = offloaded()
    model(torch.ones(3, 8))
    with torch.no_grad():
        model(torch.ones(3, 8))
    gc.collect()
    assert len(host_copies) == 4 and not [ref for ref in host_copies if ref() is not None]
    assert all(map(torch.equal, gradients(model), gradients(Layers())))
