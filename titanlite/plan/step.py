"""Parts of a training step on simulated ranks: FakeTensorMode tensors, which have no memory, and a fake process group.

The modules, hooks and functions are those of a run. Tensors are on the CPU; for a GPU, attention and norms have the operations
that CUDA has, and the loss its sizes of chunks. Compiled blocks keep what inductor's own partitioner keeps, and run uncompiled.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend

from models import attention
from models.decoder import Decoder
from models.further import further_of
from models.head import SIZES, Head, Kernels
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.ground.torch_private import FakeStore, FakeTensorMode, cudnn_attention, flash_attention, tree_leaves
from titanlite.loop.distillation import build_teacher
from titanlite.loop.step import forward_backward, update
from titanlite.optim import ema, own
from titanlite.optim.build import build_optimizer
from titanlite.parallel.parallelize import parallelize
from titanlite.plan.experts import Routing
from titanlite.plan.record import Allocations, Recorder, Work, mesh_slices
from titanlite.registry.family import Family
from titanlite.transforms import float8
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.parameters import allocate
from titanlite.transforms.shards import local_part

FURTHER = "further"  # the scope of the embeddings of MTP modules


@contextmanager
def simulated_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group in which this process is `rank` of `ranks`, and the others never answer. There must be none before."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Setup(NamedTuple):
    """What all steps of a prediction share."""

    family: Family
    config: Config
    mesh: DeviceMesh
    device_type: str  # the device whose kernels compute, and whose chunk sizes the loss uses
    routing: Routing  # of all experts, for what is computed and sent; memory is for the worst
    fused_loss: bool  # whether the head's kernels are compiled


class MicrobatchMemory(NamedTuple):
    """Bytes of one microbatch, on top of masters, optimizer state and the gradients of microbatches before it."""

    kept: dict[str, int]  # what each layer, and each MTP module, keeps from its forward pass for its backward pass
    # what each of them, "embed" and "head" leave behind in their backward passes: gradients, if they had none
    left: dict[str, int]
    peaks: dict[str, int]  # the most bytes during each phase of a layer, "embed" or "head": "backward 0", "loss head"


def measure_memory(setup: Setup, layers: Sequence[str], accumulates: bool) -> MicrobatchMemory:
    """What a model of these layers holds in the second of two microbatches. accumulates: beside the gradients of the first."""
    model, allocations = _with_teacher(setup, layers), Allocations()
    kept: Counter[str] = Counter()  # when the head begins, the last time
    left: dict[str, int] = {}

    def enter(name: str, phase: str) -> None:
        live = allocations.live_by_scope()
        live.pop(allocations.scope, None)  # what a layer hands to the next one is still there
        left.update(live)
        allocations.enter(f"{phase} {name}")

    def hold(*_: Any) -> None:
        kept.clear()
        kept.update(allocations.live_by_scope())

    _announce(model, enter)
    assert model.head is not None
    # not before its parameters are gathered, which frees the last layer's
    model.head.register_forward_pre_hook(hold)
    with FakeTensorMode(allow_non_fake_inputs=True), allocations:
        _materialize(model)
        _forward_backward(model, setup, 1)
        if not accumulates:
            model.zero_grad()
        allocations.begin()
        allocations.enter("forward embed")
        kept.clear()
        left.clear()
        _forward_backward(model, setup, 1)
        left = allocations.live_by_scope() | left
    names = [*layers, *([FURTHER] if further_of(model) else []), *further_of(model)]
    return MicrobatchMemory(
        {name: kept[f"forward {name}"] for name in names},
        {"head": left.get("loss head", 0)} | {name: left.get(f"backward {name}", 0) for name in ("embed", *names)},
        allocations.peaks,
    )


def measure_work(setup: Setup, layers: Sequence[str], often_run: Sequence[int], kept: bool = False) -> Recorder:
    """Records what the forward and backward passes of a step of these layers compute and send, by scopes of the program.

    A scope is one of the layers or an MTP module, "embed", FURTHER, "head", or "" before the first microbatch.
    often_run: for each microbatch that is run, for how many of a step it stands. kept: parameters stay gathered until the end.
    """
    model, recorder = _with_teacher(setup, layers), Recorder(mesh_slices(setup.mesh), setup.routing)
    microbatches = iter(often_run)

    def enter_microbatch(*_: Any) -> None:
        recorder.often = next(microbatches)
        enter("embed")

    def enter(scope: str, _: str = "") -> None:
        recorder.scope = scope

    _announce(model, enter)
    first = model if model.teacher is None else model.teacher.model
    first.register_forward_pre_hook(enter_microbatch, prepend=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _materialize(model)
        float8.measure_weights(model)  # as the step before has done
        if kept and isinstance(model, FSDPModule):
            model.set_reshard_after_backward(False)
        with recorder:
            _forward_backward(model, setup, len(often_run))
    return recorder


def _announce(model: Decoder, enter: Callable[[str, str], None]) -> None:
    """Calls `enter` when a layer or "embed" begins its "forward" or "backward" pass, and with "head" and "loss"."""

    def before_backward(_: nn.Module, __: Any, result: Any, name: str) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: enter(name, "backward"))

    assert model.embed is not None and model.head is not None
    embedding = "embed"

    def begin(*_: Any) -> None:
        nonlocal embedding
        embedding = "embed"

    def embedded(module: nn.Module, args: Any, result: Any) -> None:
        nonlocal embedding
        before_backward(module, args, result, embedding)
        embedding = FURTHER  # of the next call in this forward pass

    model.register_forward_pre_hook(begin, prepend=True)
    model.embed.register_forward_pre_hook(lambda *_: enter(embedding, "forward"), prepend=True)
    model.embed.register_forward_hook(embedded, prepend=True)
    for name, layer in [*model.layers.items(), *further_of(model).items()]:
        # before the hooks of FSDP2, whose gathers then count as the layer's
        layer.register_forward_pre_hook(lambda *_, name=name: enter(name, "forward"), prepend=True)
        layer.register_forward_hook(partial(before_backward, name=name), prepend=True)
    model.head.register_forward_pre_hook(lambda *_: enter("head", "loss"), prepend=True)


class Update(NamedTuple):
    """What rank 0 holds and does when the optimizer updates all parameters."""

    state: int  # bytes of the optimizer's state, counts of steps apart
    working: int  # bytes allocated at the peak, on top of masters, gradients and state
    work: Work


def measure_update(setup: Setup, layers: Sequence[str]) -> Update:
    """Updates all parameters of these layers, embedding and head once."""
    model, config, slices = _some_layers(setup, layers), setup.config, mesh_slices(setup.mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _materialize(model)
        compute = DTYPES[config.training.mixed_precision_param]
        optimizer = build_optimizer(model, config.optimizer, compute, compiler=_without_kernel)
        own.make_state(optimizer)
        ema.attach(optimizer, config.optimizer.ema_decay)
        allocations = Allocations()
        for _ in range(2):  # the second is measured: the first makes tables that stay
            with allocations:
                for parameter in trained(model):
                    parameter.grad = torch.empty_like(parameter)
            allocations.begin()  # views of parameters, gradients and moments allocate nothing
            recorder = Recorder(slices)
            with allocations, recorder:
                update(model, optimizer, config.optimizer.lr, config.training.max_norm)
    average = ema.ema_of(optimizer)
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    tensors += average.averages.values() if average else []
    return Update(
        sum(local_bytes(tensor) for tensor in tensors if tensor.ndim),
        max(allocations.peaks.values(), default=0),
        recorder.work(),
    )


def _without_kernel(_: Callable[..., None]) -> Callable[..., None]:
    """A `Compiler` that leaves the kernels of optimizers out.

    Such a kernel writes to its arguments, and allocates, multiplies and sends nothing. Uncompiled, its temporaries for the
    embedding and the matrices of an 8B model in bfloat16 would take 77 GiB.
    """
    return lambda *_: None


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that rank 0 holds."""
    return local_part(tensor).numel() * tensor.element_size()


def _some_layers(setup: Setup, layers: Sequence[str]) -> Decoder:
    torch.compiler.reset()  # it counts the models that it has compiled
    model = parallelize(setup.family, setup.config, setup.mesh, torch.device("cpu"), layers)
    if isinstance(model.head, Head):
        model.head.sizes = model.head.sizes or SIZES[setup.device_type]
        if setup.fused_loss:
            model.head.kernels = _FUSED
    return model


def _with_teacher(setup: Setup, layers: Sequence[str]) -> Decoder:
    """The same beside the whole teacher of the run, if it has one."""
    teacher = build_teacher(setup.config, setup.mesh, torch.device("cpu"))  # first, as a run does: it sets the compiler too
    model = _some_layers(setup, layers)
    model.teacher = teacher
    return model


def _materialize(model: nn.Module) -> None:
    allocate(model, torch.device("cpu"))
    if (teacher := getattr(model, "teacher", None)) is not None:
        _materialize(teacher.model)


def _forward_backward(model: Decoder, setup: Setup, microbatches: int) -> None:
    training = setup.config.training
    tokens = torch.zeros(microbatches, training.local_batch_size, training.seq_len + 1, dtype=torch.int64)
    with _kernels_of(setup):
        forward_backward(model, Batch(tokens), setup.mesh)


# ----------------------------------------------------------------------------------------------------- operations of a GPU


@contextmanager
def _kernels_of(setup: Setup) -> Iterator[None]:
    """The device's attention, and its norms in blocks that are not compiled; masks of FlexAttention take no memory."""
    before = attention.attend, attention.attend_by_parts, attention.dense_mask, F.rms_norm
    if setup.device_type == "cuda":
        attention.attend = attend = partial(_attend_on_cuda, elsewhere=attention.attend)
        # a GPU has a block mask for the keys of other ranks, and no kernel of its own
        attention.attend_by_parts = lambda q, k, v, split, scale: attend(q, k, v, None, scale, None)
        attention.dense_mask = lambda documents, *_: documents.new_ones(1, 1, 1, 1, dtype=torch.bool)
        if not setup.config.compile.enable:
            F.rms_norm = _rms_norm
    try:
        yield
    finally:
        attention.attend, attention.attend_by_parts, attention.dense_mask, F.rms_norm = before


def _attend_on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    backend: attention.Backend | None = None,
    sinks: Tensor | None = None,
    *,
    elsewhere: Callable[..., Tensor],
) -> Tensor:
    """A fused kernel's: it keeps its result and one number for each query and head. So do FlexAttention's, for masks too."""
    if backend == SDPBackend.MATH:
        return elsewhere(q, k, v, mask, scale, softcap, backend, sinks)
    groups, equal = q.shape[1] // k.shape[1], q.shape[-1] == v.shape[-1]
    # in float32 plain causal attention is the memory-efficient kernel's, which has no grouped queries
    plain = mask is None and softcap is None and sinks is None and q.shape[2] == k.shape[2]
    if groups > 1 and (not equal or (plain and q.dtype == torch.float32)):
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    if equal:
        out, log_sum = flash_attention(q, k, v, 0.0, True, scale=scale)[:2]
    else:
        out, log_sum = cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)[:2]
    if sinks is None:
        return out
    return out * (log_sum.view(out.shape[:-1]) - sinks[:, None]).sigmoid()[..., None].type_as(out)


def _rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """F.rms_norm with the memory of CUDA's fused kernel; a CPU has several operations."""
    return _FusedNorm.apply(input, weight, len(normalized_shape))


class _FusedNorm(torch.autograd.Function):
    """Keeps its input and one number for each row of `dimensions` dimensions."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-dimensions], dtype=torch.float32))
        return torch.empty_like(x, dtype=x.dtype if weight is None else torch.result_type(x, weight))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


# The head's kernels as inductor fuses them: they write their results and no float32 copy of the logits.
_FUSED = Kernels(
    lambda logits, _, __: (logits.new_empty(len(logits), dtype=torch.float32),) * 2,
    lambda *_: None,
    lambda *_: None,
)
