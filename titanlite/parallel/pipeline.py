"""Pipeline parallelism: the blocks are cut into stages on different ranks, between which hidden states are sent.

PyTorch's schedules (torch.distributed.pipelining) run the stages; they accumulate the gradients of all microbatches, and FSDP2
reduces them once a step. Each rank's model is a `Decoder` whose tensors have the names that they have in the whole model, so
that initial values, optimizers and checkpoints need not know of stages.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.attention import SeqInfo
from models.decoder import Decoder
from titanlite.config.conflicts import Conflict, conflicts
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13, with_children
from titanlite.launch.process import of_all_ranks
from titanlite.parallel.dataflow import Flow, Replay, not_carried, trace
from titanlite.parallel.mesh import data_degree, parts_of, resolve_degrees
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.registry.family import Family
from titanlite.transforms.meta import active_parameters, on_meta
from titanlite.transforms.parameters import is_tied

_T = TypeVar("_T")

# How many stages a rank has, unless pipeline_parallel_layers_per_stage decides it.
STAGES_OF_A_RANK = {"GPipe": 1, "1F1B": 1, "LoopedBFS": 2, "Interleaved1F1B": 2}


class Microbatch(NamedTuple):
    """What a forward pass needs. Every stage has it."""

    inputs: Tensor  # (batch, seq), this rank's part of split sequences
    labels: Tensor  # (batch, seq)
    seq: SeqInfo


# -------------------------------------------------------------------------------------------------- stages of the ranks


def split_layers(config: Config, family: Family, model: Decoder) -> list[list[str]]:
    """The names of the blocks of each stage. model: whole, on the meta device.

    Without `pipeline_parallel_layers_per_stage` the longest stage is as short as it can be, counted in FLOPs of the model's own
    formula; the last stage has the head too. Raises ValueError if there are fewer blocks than stages.
    """
    names, cfg = list(model.layers), config.parallelism
    if (size := cfg.pipeline_parallel_layers_per_stage) != -1:
        return [names[first : first + size] for first in range(0, len(names), size)]
    stages = STAGES_OF_A_RANK[cfg.pipeline_parallel_schedule] * cfg.pipeline_parallel_degree
    blocks, of_head = costs(config, family, model)
    sizes = balanced(list(blocks.values()), stages, of_head)
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [names[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def costs(config: Config, family: Family, model: Decoder) -> tuple[dict[str, float], float]:
    """The multiplications of a forward pass for a token: of each block, and of the head."""
    matmuls = {name: active_parameters(block) for name, block in model.layers.items()}
    of_head = active_parameters(model.head)
    # training takes 6 FLOPs for each; the rest is attention, which is divided equally among the blocks
    every = family.module.flops(family.config, config.training.seq_len).causal / 6
    attention = (every - sum(matmuls.values()) - of_head) / len(matmuls)
    return {name: numbers + attention for name, numbers in matmuls.items()}, of_head


def balanced(costs: Sequence[float], parts: int, of_last: float) -> list[int]:
    """How many of `costs`, in their order, each part gets so that the largest sum is smallest.

    of_last: what the last part costs in addition. Of equal divisions the one with the smallest sum of squares. Raises
    ValueError if there are fewer costs than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} blocks are fewer than {parts} stages")
    sums = [0.0, *itertools.accumulate(costs)]
    # best[n]: (largest sum, sum of squares, sizes) of the first n costs in as many parts as the loop has made
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for part in range(1, parts + 1):
        extra = of_last if part == parts else 0.0
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(part, len(costs) - (parts - part) + 1):
            options = []
            for begin, (largest, squares, sizes) in best.items():
                if begin < end:
                    cost = sums[end] - sums[begin] + extra
                    options.append((max(largest, cost), squares + cost * cost, [*sizes, end - begin]))
            longer[end] = min(options)
        best = longer
    return best[len(costs)][2]


class StageAssignment(NamedTuple):
    """The parts of a model on one rank of a pipeline."""

    stages: dict[int, list[str]]  # number of a stage -> its blocks
    embed: bool
    head: bool
    tied: bool  # the head's output is the embedding

    def has(self, name: str) -> bool:
        """Whether a tensor of the whole model is here."""
        part, _, rest = name.partition(".")
        if part == "layers":
            return any(rest.partition(".")[0] in blocks for blocks in self.stages.values())
        return self.head if part == "head" else self.embed or (self.tied and self.head)


def assign_stages(config: Config, family: Family, model: Decoder) -> list[StageAssignment]:
    """The share of each rank of a pipeline. model: whole, on the meta device."""
    layers, ranks = split_layers(config, family, model), config.parallelism.pipeline_parallel_degree
    numbers = [range(rank, len(layers), ranks) for rank in range(ranks)]
    tied, last = is_tied(model), len(layers) - 1
    return [StageAssignment({n: layers[n] for n in mine}, 0 in mine, last in mine, tied) for mine in numbers]


def flow_of(config: Config, family: Family, tp: DeviceMesh) -> Flow:
    """The flow of a run on one rank: shapes are those of its part of the sequence, dtypes those that FSDP2 casts to."""
    training = config.training.model_copy(update={"dtype": config.training.mixed_precision_param})
    model = on_meta(family, config.model_copy(update={"training": training}))
    apply_tensor_parallel(model, family, tp)
    return trace(model, training.local_batch_size, training.seq_len // config.parallelism.context_parallel_degree)


def received_by_stages(flow: Flow, layers: list[list[str]]) -> list[list[Tensor]]:
    """What each stage receives for a microbatch, on the meta device. layers: the names of the blocks of each stage."""
    first = [flow.calls_of({f"layers.{name}" for name in names}).start for names in layers[1:]]
    return [[], *([flow.tensors[number] for number in flow.crossing(call)] for call in first)]


def take_stages(model: Decoder, share: StageAssignment, flow: Flow) -> list["Stage"]:
    """Removes all but a rank's share from a whole model on the meta device; returns its stages.

    If embedding and head are one parameter, the rank with the head keeps it as `embed.weight`, its name in the whole model.
    """
    last = max(share.stages)
    stages = [Stage(model, number, blocks, share.head and number == last, flow) for number, blocks in share.stages.items()]
    for name in [name for name in model.layers if not share.has(f"layers.{name}")]:
        del model.layers[name]
    model.head = model.head if share.head else None
    model.embed = model.embed if share.has("embed.weight") else None
    return stages


class Stage(nn.Module):
    """Consecutive blocks of a rank's model, with the embedding before the first one and the head after the last one."""

    microbatches: Sequence[Microbatch] = ()  # of the step that runs
    microbatch = 0  # the number of the one that runs

    def __init__(self, model: Decoder, number: int, layers: Sequence[str], last: bool, flow: Flow):
        super().__init__()
        self.number = number
        calls = flow.calls_of({*(f"layers.{name}" for name in layers), *(["embed"] if number == 0 else [])})
        self.replay = Replay(model, flow, calls, last)
        self.part = copy.copy(model)  # the same blocks and parameters, and other attributes
        ends = {"embed": model.embed if number == 0 else None, "head": model.head if last else None}
        blocks = nn.ModuleDict({name: model.layers[name] for name in layers})
        with_children(self.part, model, {"layers": blocks, **ends})

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What later stages use, or the last stage's hidden states (batch, seq, dim). Stage 0 ignores what it gets."""
        inputs, _, seq = self.microbatches[self.microbatch]
        return self.replay(received, inputs, seq)


# ------------------------------------------------------------------------------------------------------------ running stages


class Pipeline:
    """A rank's stages, and the schedule that runs them together with those of the other ranks of `pp`."""

    def __init__(
        self, stages: list[Stage], model: Decoder, config: Config, mesh: DeviceMesh, device: torch.device, has_tied: bool
    ):
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        from titanlite.parallel.late_stage import LateStage

        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs what it raises
        pp, cfg = mesh["pp"], config.parallelism
        self.stages, self.model, self.group, self.ranks = stages, model, pp.get_group(), pp.size()
        self.has_tied = has_tied  # of the whole model; a fork may tie without a key of its Config
        self.microbatches, self.schedule_name = config.microbatches(data_degree(mesh)), cfg.pipeline_parallel_schedule
        count = int(len(stages) * pp.size())
        self.head = stages[-1].part.head
        interfaces = [stage.replay.interface() for stage in stages]
        ignored = (torch.empty(1, device="meta"),)  # by stage 0
        self._parts = [
            LateStage(stage, stage.number, count, device, input_args=takes or ignored, output_args=gives, group=self.group)
            for stage, (takes, gives) in zip(stages, interfaces, strict=True)
        ]
        kind = get_schedule_class(self.schedule_name)
        several: Any = self._parts if issubclass(kind, PipelineScheduleMulti) else self._parts[0]
        self._schedule = kind(several, n_microbatches=self.microbatches, loss_fn=self._loss_after_forward, scale_grads=False)
        self._parts[-1].loss_of = self._backward_loss
        if model.head is not None and model.embed is not None and self.stages[0].number > 0:
            model.embed.weight = model.head.output.weight  # FSDP2 has replaced it in the head

    def train(self, microbatches: Sequence[Microbatch], divisor: Tensor) -> Tensor:
        """Adds the gradients of a step; returns the summed loss of each microbatch, (microbatches,) float32.

        Zeros on ranks without the head. divisor: of the losses, for the gradients; () float32.
        """
        losses = self._run(self._schedule.step, microbatches, divisor)
        self._add_tied_gradients()
        return losses

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """The summed loss of each microbatch, (microbatches,) float32; zeros on ranks without the head. Without gradients."""
        return self._run(self._schedule.eval, microbatches, torch.ones((), device=microbatches[0].inputs.device))

    def _run(self, run: Callable[..., Any], microbatches: Sequence[Microbatch], divisor: Tensor) -> Tensor:
        assert len(microbatches) == self.microbatches, "a schedule is made for a number of microbatches"
        numbers = torch.arange(len(microbatches))  # on the CPU, where they are read
        self._divisor, self._losses = divisor, torch.zeros(len(microbatches), device=microbatches[0].inputs.device)
        for stage in self.stages:
            stage.microbatches = microbatches
        first = (self._losses,) if self.stages[0].number == 0 else ()  # a part for each microbatch, which the stage ignores
        run(*first, target=numbers if self.head is not None else None, return_outputs=False)
        for stage, part in zip(self.stages, self._parts, strict=True):
            stage.microbatches = ()
            part.clear()
        return self._losses

    def _loss_after_forward(self, hidden: Tensor, number: Tensor) -> Tensor:
        """PyTorch requests a loss after each forward pass of the last stage. `LateStage` computes the one with gradients."""
        if self._parts[-1].has_backward:
            return hidden.new_zeros(())  # a placeholder, which nothing reads
        return self._backward_loss(hidden, int(number))

    def _backward_loss(self, hidden: Tensor, number: int) -> Tensor:
        """The loss at which the last stage's backward pass begins, () float32. hidden: a microbatch's (batch, seq, dim)."""
        assert self.head is not None
        summed = self.head(hidden, self.stages[-1].microbatches[number].labels)
        self._losses[number] = summed.detach()
        return summed / self._divisor

    @property
    def tied(self) -> Tensor | None:
        """The parameter that is both the first stage's embedding and the last one's output, if this rank has it."""
        return self.model.embed.weight if self.has_tied and self.model.embed is not None else None

    def _add_tied_gradients(self) -> None:
        """Gives the first and the last rank the sum of their gradients of the tied parameter, the same bit for bit."""
        if self.tied is None or not self.tied.requires_grad:
            return
        assert self.tied.grad is not None
        own = self.tied.grad.to_local() if hasattr(self.tied.grad, "to_local") else self.tied.grad
        others = torch.empty_like(own)
        rank = dist.get_rank(self.group)
        peer = dist.get_global_rank(self.group, self.ranks - 1 - rank)
        exchange = [dist.P2POp(dist.isend, own, peer, self.group), dist.P2POp(dist.irecv, others, peer, self.group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own.add_(others)

    def gathered(self, values: Iterable[_T]) -> list[_T]:
        """The values of all ranks of the pipeline, which call this together."""
        return [value for part in of_all_ranks(list(values), self.group) for value in part]


# ------------------------------------------------------------------------------------------------------------------ the check


def unsplittable(family: Family, degree: int) -> str:
    """Why a model cannot be cut into stages for so many ranks; "" if it can."""
    model = family.on_meta()
    others = [name for name, _ in model.named_children() if name not in ("embed", "layers", "head")]
    others += [name for name, _ in [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]]
    if others:
        return f"no stage has {', '.join(others)}, beside embed, layers and head"
    if len(model.layers) < degree:
        return f"{degree} ranks share {len(model.layers)} blocks"
    if reason := not_carried(family):
        return reason
    more = [name for name in model.state_dict() if is_tied(model) and name.startswith("embed.") and name != "embed.weight"]
    return f"the last stage would have {', '.join(more)} beside the tied weight, and not train it" if more else ""


_STAGES = "parallelism.pipeline_parallel_degree > 1"
CONFLICTS: tuple[Conflict, ...] = (
    (_STAGES, "parallelism.cpu_offload = true", "it is not supported; set one of them back"),
    (_STAGES, 'parallelism.fsdp_reshard_after_forward = "always"', 'a pipeline keeps what it has gathered; use "default"'),
    (_STAGES, "validation.sample_prompts is set", "no rank has the whole model; set it to [], and use titanlite generate"),
)


def faults(config: Config, family: Family, model: Decoder) -> Iterator[str]:
    """Models that cannot be cut into so many stages, options that need a whole model."""
    degree = config.parallelism.pipeline_parallel_degree
    if degree == 1:
        return
    key = f"parallelism.pipeline_parallel_degree = {degree}"
    if reason := unsplittable(family, degree):
        yield f"{key}: in {config.model.name}, {reason}; set it to 1"
        return
    yield from _stage_faults(config, family, model, key)
    yield from conflicts(config, CONFLICTS)


def _stage_faults(config: Config, family: Family, model: Decoder, key: str) -> Iterator[str]:
    cfg = config.parallelism
    degree, schedule = cfg.pipeline_parallel_degree, cfg.pipeline_parallel_schedule
    try:
        layers = split_layers(config, family, model)
    except ValueError as error:
        yield f'{key}, pipeline_parallel_schedule = "{schedule}": {error} of {config.model.title}; lower it'
        return
    stages = len(layers)
    if BEFORE_2_13:
        received = itertools.chain(*received_by_stages(trace(family.on_meta()), layers))
        if not all(tensor.is_floating_point() for tensor in received):
            name = config.model.name
            yield f"{key}: blocks of {name} use whole numbers of earlier stages, which needs PyTorch 2.13; set it to 1"
    yield from (f"{key}: {fault}" for fault in _frozen(layers, model))
    of_a_rank = STAGES_OF_A_RANK[schedule]
    if stages % degree or (of_a_rank == 1 and stages != degree) or stages < of_a_rank * degree:
        wanted = f"{degree} stages" if of_a_rank == 1 else f"a multiple of {degree} stages, at least {of_a_rank * degree}"
        yield (
            f'{key}, pipeline_parallel_schedule = "{schedule}": needs {wanted}, and of {len(model.layers)} blocks '
            f"pipeline_parallel_layers_per_stage = {cfg.pipeline_parallel_layers_per_stage} makes {stages}; set it to -1"
        )


def _frozen(layers: list[list[str]], model: Decoder) -> Iterator[str]:
    """Stages without a trained block: they would have no backward pass, and their ranks perhaps no optimizer."""
    for number, names in enumerate(layers):
        if not any(parameter.requires_grad for name in names for parameter in model.layers[name].parameters()):
            where = f"stage {number}, blocks {', '.join(names)}"
            yield f"lora.modules and optimizer.groups leave nothing to train in {where}; each stage needs a trained parameter"


def microbatch_faults(config: Config, ranks: int) -> Iterator[str]:
    """A number of microbatches that the schedule does not take. Raises UserError for a mesh that does not fit the ranks."""
    cfg = config.parallelism
    degree, schedule = cfg.pipeline_parallel_degree, cfg.pipeline_parallel_schedule
    if degree == 1:
        return
    count = config.microbatches(parts_of(resolve_degrees(cfg, ranks)))
    sizes = "global_batch_size / (local_batch_size x data-parallel ranks)"
    if count < degree and schedule != "LoopedBFS":
        yield (
            f'parallelism.pipeline_parallel_schedule = "{schedule}", parallelism.pipeline_parallel_degree = {degree}: needs at '
            f"least {degree} microbatches a step, {sizes}, and there are {count}; raise training.global_batch_size or lower "
            "training.local_batch_size"
        )
    elif schedule == "Interleaved1F1B" and count % max(1, count // degree):
        yield (
            f'parallelism.pipeline_parallel_schedule = "{schedule}": {count} microbatches a step, {sizes}, cannot be done in '
            f"equal groups of {degree} or slightly more; make them a multiple of {degree}"
        )
