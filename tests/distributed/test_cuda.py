"""What only a GPU can show, on one of them: no step waits for it, offload changes nothing, a tiny run equals the CPU's, and
FlexAttention's kernels keep documents apart as the dense mask does.

Without a GPU most of them run on the CPU as far as possible, so that a changed name or signature is found at once.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models import llama3
from models.attention import dense_mask
from models.moe import _wide_linear
from tests.distributed.scenarios import config_of, learnable_data
from tests.flash import fault_of_flash
from tests.tiny import FLAVORS
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.data.batches import Batches, StepDataset
from titanlite.ground.errors import UserError
from titanlite.launch import process
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.optim.lr_schedule import build_schedule
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.registry.family import family_of, load_family
from titanlite.transforms.activation_checkpoint import checkpoint_blocks, checkpoint_operations
from titanlite.transforms.attention_kernels import attention_sentence, choose_attention
from titanlite.transforms.attention_kernels import faults as attention_faults
from titanlite.transforms.dtypes import DTYPES
from titanlite.verify.compare import Trajectory, batches_of, begin, compare, record_run

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """A host sync inside raises an error. On a CPU there are none."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def group():
    process.start(Config(), {})
    yield
    dist.destroy_process_group()


def trajectory(device: str, **sections) -> Trajectory:
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), device)
    config = config_of({}, **sections)
    return record_run(begin(config, mesh, torch.device(device)), batches_of(config, learnable_data(config), mesh))


def test_a_step_that_is_not_reported_never_waits_for_the_device(device):
    config = config_of({}, accumulation=2, training={"mixed_precision_param": "bfloat16"})
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), device.type)
    model = build_model(load_family("tests.tiny", "plain"), config, mesh, device)
    optimizer, schedule = build_optimizer(model, config.optimizer), build_schedule(config)
    source = Batches(StepDataset(config, learnable_data(config), (0, 1)), device)

    def step(number: int) -> None:
        forward_backward(model, next(source), mesh)
        update(model, optimizer, schedule.at(number), config.training.max_norm)

    step(1)
    with waiting_is_an_error(device):
        step(2)


def test_a_gpu_has_the_initial_weights_bit_for_bit_and_the_losses_of_a_cpu(device):
    torch.backends.cuda.matmul.allow_tf32 = False
    result = compare(trajectory(device.type), trajectory("cpu"))
    assert result.worst("weights").size == result.worst("batches").size == 0
    assert result.worst("losses").size < 1e-4
    assert result.worst("gradients").size < 1e-4, result.worst("gradients")


@needs_cuda
def test_offload_to_the_cpu_changes_nothing():
    offloaded = trajectory("cuda", parallelism={"cpu_offload": True})
    assert compare(offloaded, trajectory("cuda")).equal


@needs_cuda
def test_a_bfloat16_router_has_the_logits_and_gradients_of_a_cpu():
    x, weight, gradients = torch.randn(512, 256).bfloat16(), (torch.randn(64, 256) / 16).bfloat16(), torch.randn(512, 64)
    results = {}
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (x, weight)]
        logits = _wide_linear(*leaves, None)
        results[device] = [logits, *torch.autograd.grad(logits, leaves, gradients.to(device))]
    on_cpu, on_gpu = results["cpu"], [tensor.cpu() for tensor in results["cuda"]]
    torch.testing.assert_close(on_gpu[0], on_cpu[0], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(on_gpu[1:], on_cpu[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine == theirs).float().mean() > 0.98


# ------------------------------------------------------------------------------------------------ attention inside documents

_LENGTHS = [(1, 130, 250, 4), (300, 84, 1), (385,)]  # of documents in three rows of 384 tokens and a last label
_FLEX_HEAD = 16  # the fewest dimensions that FlexAttention's kernels support


def flexible_model(dtype: torch.dtype, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model = llama3.Model(dataclasses.replace(FLAVORS["plain"], head_dim=_FLEX_HEAD))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)  # rounded here, since PyTorch 2.11 draws different numbers for bfloat16 and float32


def packed_rows(device: torch.device, seed: int = 0) -> Batch:
    """Rows of whole documents, whose first tokens are no labels; other rows come first for every seed."""
    rows = [_LENGTHS[(row + seed) % len(_LENGTHS)] for row in range(len(_LENGTHS))]
    numbers = [torch.repeat_interleave(torch.tensor(row)) for row in rows]
    documents = torch.stack(numbers).int()
    counted = documents == documents.roll(1, dims=1)
    counted[:, 0] = False
    tokens = torch.randint(512, documents.shape, generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, counted, documents[:, :-1]).to(device)


def loss_and_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = summed_loss(model, batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad.float() for name, parameter in model.named_parameters()}}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in expected.items())


_ON_CPU = (torch.float32, "per operation", False)
_CELLS = itertools.product([torch.float32, torch.bfloat16], ["none", "full", "per operation"], [False, True])


@pytest.mark.parametrize(
    ("dtype", "mode", "compiled"),
    [pytest.param(*cell, marks=() if cell == _ON_CPU else needs_cuda) for cell in _CELLS],
)
def test_flex_attention_keeps_documents_apart_as_the_dense_mask_does(monkeypatch, device, dtype, mode, compiled):
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    batches = [packed_rows(device, seed) for seed in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(llama3, "with_mask", lambda seq: seq._replace(mask=dense_mask(seq.documents)))
        dense = [loss_and_gradients(flexible_model(dtype, device), batch) for batch in batches]
    counters.clear()
    model = flexible_model(dtype, device)
    if mode == "per operation":
        checkpoint_operations(model, ())
    if compiled:
        for layer in model.layers.values():
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    if mode == "full":
        checkpoint_blocks(model, every=1)
    within = 1e-4 if dtype == torch.float32 else 3e-2
    for batch, expected in zip(batches, dense, strict=True):
        assert furthest(loss_and_gradients(model, batch), expected) < within
    # the blocks of the mask, and attention or the layer that holds it; a CPU's mask is the dense one
    assert counters["stats"]["unique_graphs"] == (2 if device.type == "cuda" else 0)


def test_nothing_about_documents_waits_for_the_device(device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, batches = flexible_model(dtype, device), [packed_rows(device, seed) for seed in range(2)]
    summed_loss(model, batches[0]).backward()
    with waiting_is_an_error(device):
        summed_loss(model, batches[1]).backward()


# ------------------------------------------------------------------------------------------------------ kernels of attention


def of_kernel(name: str, precision: str, device: torch.device, mask: bool = False) -> tuple[dict[str, Tensor], str]:
    """Loss and gradients with one attention kernel, and the log's line about it."""
    config = config_of({}, model={"attention": name}, training={"mixed_precision_param": precision})
    model = flexible_model(DTYPES[precision], device)
    choose_attention(model, config, device)
    batch = packed_rows(device)
    found = loss_and_gradients(model, batch if mask else batch._replace(documents=None))
    return found, attention_sentence(model, config)


@pytest.mark.parametrize("name", ["auto", "cudnn", "flash", "efficient"])
def test_every_attention_kernel_equals_the_reference(name, device):
    config = config_of({}, model={"attention": name}, training={"mixed_precision_param": "bfloat16"})
    family = family_of(config.model)
    here = fault_of_flash() if device.type == "cpu" else ""
    if fault := next(attention_faults(config, family, family.on_meta()), here):
        pytest.skip(fault)
    expected, _ = of_kernel("math", "float32", device)
    try:
        found, label = of_kernel(name, "bfloat16", device)
    except UserError as error:
        pytest.skip(str(error))
    assert furthest(found, expected) < 5e-2
    if device.type == "cpu":
        by_rule = "flash"
    else:
        kernel = "cudnn" if torch.cuda.get_device_capability()[0] == 9 else "flash"
        by_rule = f"{kernel}, and FlexAttention where masked or capped"
    assert label == (by_rule if name == "auto" else f"{name}, forced")


@pytest.mark.parametrize("name", [pytest.param("efficient", marks=needs_cuda), "math"])
def test_kernels_that_take_masks_keep_documents_apart_as_flex_attention_does(name, device):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert furthest(of_kernel(name, "float32", device, mask=True)[0], of_kernel("auto", "float32", device, mask=True)[0]) < 1e-4
