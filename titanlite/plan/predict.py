"""From a configuration to what rank 0 of a run holds, computes and sends in a step, without the ranks.

All that a step holds, computes and sends is measured on a few layers, at least one of each kind, and counted for
each layer that is equal to one of them. Only Muon updates the whole model.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.decoder import Decoder
from titanlite.config.effects import Hardware
from titanlite.config.schema import Compile, Config
from titanlite.ground.errors import UserError, phase
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.loop.distillation import build_teacher
from titanlite.optim.state import state_bytes
from titanlite.parallel.dataflow import Flow
from titanlite.parallel.fsdp import GradientSync, waiting_units
from titanlite.parallel.mesh import build_mesh, data_degree, resolve_degrees
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline import StageAssignment, assign_stages, flow_of, received_by_stages, split_layers
from titanlite.plan import pipeline
from titanlite.plan.experts import Routing
from titanlite.plan.fused import register_backend
from titanlite.plan.layers import Layers
from titanlite.plan.memory import unsharded
from titanlite.plan.moments import MemoryEstimate, Moment, highest, through_layers
from titanlite.plan.record import Channel, Recorder, Traffic, Work
from titanlite.plan.step import (
    MicrobatchMemory,
    Setup,
    Update,
    local_bytes,
    measure_memory,
    measure_update,
    measure_work,
    simulated_ranks,
    trained,
)
from titanlite.registry.family import family_of
from titanlite.transforms.activation_checkpoint import PARTITIONED, compiler_recomputes
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.parameters import is_tied
from titanlite.transforms.shards import local_part


class Prediction(NamedTuple):
    """What rank 0 keeps and does."""

    parameters: int  # of the whole model
    moments: list[Moment]  # of the last microbatch and the update, or of a rank of a pipeline
    work: Work  # of one step
    host: int  # bytes in the host's memory: inputs of blocks that activation_checkpoint.offload keeps there
    pipeline: str = ""  # which rank of a pipeline this is, and how long it waits

    @property
    def memory(self) -> MemoryEstimate:
        """What the rank holds when it holds the most."""
        return highest(self.moments).memory

    def during(self, phase: str) -> MemoryEstimate:
        """What the rank holds when it holds the most in a phase."""
        return highest(each for each in self.moments if each.phase == phase).memory


@phase("predicting a step")
def predict(config: Config, ranks: int, device_type: str = "cuda", routing: Routing = "balanced") -> Prediction:
    """What rank 0 of `ranks` will hold and do. The process must not have a process group; it has none afterwards.

    See `report.limits` for what is left out. device_type: "cuda" or "cpu", which differ in the number of chunks of the loss.
    routing: of rows to experts that are split over ranks, for what is computed and sent; memory suffices for any.
    """
    config = config.settled(Hardware(ranks=ranks))  # as a run does
    precision = config.training.mixed_precision_param
    if BEFORE_2_13 and precision != "float32":  # its fake tensors take the loss's out_dtype for another argument, and fail
        raise UserError(
            f'training.mixed_precision_param = "{precision}": a prediction needs PyTorch 2.13 for it, and this is '
            f"{torch.__version__}; it is the same on any machine, without a GPU"
        )
    offload = config.parallelism.cpu_offload
    given, degree, whole = config, config.parallelism.pipeline_parallel_degree, as_measured(config)
    config = pipeline.flat(whole, memory=True) if degree > 1 else whole
    family = family_of(config.model)
    with simulated_ranks(ranks // degree):
        parameters = sum(p.numel() for p in on_meta(family_of(whole.model), whole).parameters())
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks // degree), "cpu")
        model, replicas = parallelize(family, config, mesh, torch.device("cpu")), mesh["dp_replicate"].size()
        microbatches = config.microbatches(data_degree(mesh))
        layers, fused = Layers.of(model, family, config), compiles(given, "loss")
        setup = Setup(family, config, mesh, device_type, routing, fused)
        accumulates = microbatches > 1  # otherwise no gradients exist before the backward pass
        held = measure_memory(setup, layers.few, accumulates)
        if accumulates and replicas > 1 and GradientSync.of(config).replicas:
            held = replacing(held, model)
        teacher = build_teacher(config, mesh, torch.device("cpu"))
        of_teacher = sum(map(local_bytes, teacher.model.parameters())) if teacher else 0
        on_host = dict.fromkeys(held.kept, 0)
        if config.activation_checkpoint.mode == "full" and config.activation_checkpoint.offload:
            on_host, held = held.kept, offloaded(held)
        update = whole_update(layers, setup)
        if not compiler_decides(config):  # a graph's collectives have no caller by which they could be named
            setup = setup._replace(config=config.model_copy(update={"compile": Compile()}))
        measured = Measured(model, layers, held, on_host, update, microbatches)
        if degree > 1:
            flow = flow_of(whole, family_of(whole.model), mesh["tp"])
            setup = setup._replace(config=pipeline.flat(whole).model_copy(update={"compile": setup.config.compile}))
            # the first one gathers, and the last one reduces
            often = [1, microbatches - 2, 1] if microbatches > 2 else [1] * microbatches
            recorded = measure_work(setup, layers.few, often, kept=True)
        else:
            # all microbatches but the last one are equal
            recorded = measure_work(setup, layers.few, [microbatches - 1, 1] if microbatches > 1 else [1])
    if degree > 1:
        return of_worst_rank(whole, parameters, measured, recorded, flow)
    passes = recorded.work(lambda scope: layers.times(scope) if scope in layers.few else 1)
    masters, gradients = (sum(map(local_bytes, tensors)) for tensors in (model.parameters(), trained(model)))
    waiting = waiting_gradients(config, model, replicas) if accumulates else None
    accumulated = (gradients if waiting is None else waiting) if accumulates else 0
    states = MemoryEstimate(masters + of_teacher, accumulated, update.state, 0, 0)
    moments, updating = through_layers(layers, held, states), states._replace(gradients=gradients, working=update.working)
    if offload:  # the host has the states and updates them; gradients that wait for their reduction are on the device
        on_device = {"masters": 0, "gradients": waiting or 0, "moments": 0}
        moments = [each._replace(memory=each.memory._replace(**on_device)) for each in moments]
        updating = MemoryEstimate(0, 0, 0, 0, 0)
    moments.append(Moment("update", "optimizer", updating))
    host = sum(on_host[equal] for equal in layers.stands_for.values())
    return Prediction(parameters, moments, passes.plus(update.work), host)


def waiting_gradients(config: Config, model: Decoder, replicas: int) -> int | None:
    """Bytes of gradients that wait for the reduction of the last microbatch, or None where each microbatch's are reduced.

    FSDP2 accumulates unreduced gradients in the precision of the reduction, on the device.
    """
    deferred, reduced = GradientSync.of(config), DTYPES[config.training.mixed_precision_reduce].itemsize
    if deferred.shards:
        return reduced * unsharded(config, model)
    if deferred.replicas and replicas > 1:
        waiting = {id(p) for unit in waiting_units(model) for p in unit.parameters()}
        return sum((reduced if id(p) in waiting else p.dtype.itemsize) * local_part(p).numel() for p in trained(model))
    return None


def replacing(held: MicrobatchMemory, model: Decoder) -> MicrobatchMemory:
    """The same in the last microbatch of a step whose reduction over replicas is deferred: FSDP2 adds what has waited to the
    result of the reduction, which takes its place."""
    ends = () if is_tied(model) else ("embed", "head")
    return held._replace(left={name: 0 if name in (*held.kept, *ends) else size for name, size in held.left.items()})


class Measured(NamedTuple):
    """What is known of a whole model on the ranks of one stage."""

    model: Decoder  # parallelized
    layers: Layers
    held: MicrobatchMemory  # of a microbatch
    on_host: dict[str, int]  # bytes that the host keeps of each of the few layers for a microbatch
    update: Update
    microbatches: int

    def part_of(self, share: StageAssignment) -> float:
        """The bytes of a share's trained parameters, of all."""
        sizes = {name: local_bytes(p) for name, p in self.model.named_parameters() if p.requires_grad}
        return sum(size for name, size in sizes.items() if share._replace(tied=False).has(name)) / sum(sizes.values())


# ------------------------------------------------------------------------------------------------------------- a pipeline


def of_worst_rank(config: Config, parameters: int, measured: Measured, recorded: Recorder, flow: Flow) -> Prediction:
    """The prediction of the rank of a pipeline that holds the most. config: with the pipeline. flow: on these ranks."""
    family, degree = family_of(config.model), config.parallelism.pipeline_parallel_degree
    whole = on_meta(family, config)
    every = assign_stages(config, family, whole)
    received = received_by_stages(flow, split_layers(config, family, whole))
    costs = pipeline.stage_costs(config, family, whole)
    with simulated_ranks(degree):
        schedule = config.parallelism.pipeline_parallel_schedule
        order = pipeline.orders(schedule, degree, measured.microbatches, len(costs))
    backward = 3 if config.activation_checkpoint.mode == "full" else 2
    bubble = pipeline.rehearse(order, costs, [backward * cost for cost in costs]).bubble
    each = [moments_of(share, config, whole, measured, received, order[rank]) for rank, share in enumerate(every)]
    rank = max(range(degree), key=lambda rank: highest(each[rank]).memory.total)
    stages, equal = every[rank].stages, measured.layers.stands_for
    on_host = {number: sum(measured.on_host[equal[name]] for name in blocks) for number, blocks in stages.items()}
    host = max(kept for _, kept, _ in pipeline.held_after(order[rank], on_host, dict.fromkeys(stages, 0)))
    text = f"rank {rank} of {degree} in the pipeline, which holds the most; the bubble is {bubble:.1%} of a step"
    return Prediction(parameters, each[rank], work_of(every[rank], degree, measured, recorded, received), host, text)


def size_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def moments_of(
    share: StageAssignment,
    config: Config,
    whole: Decoder,
    measured: Measured,
    received: list[list[Tensor]],
    order: list[pipeline.Action],
) -> list[Moment]:
    """What a rank of a pipeline holds. whole: the model on the meta device. received: by each stage, for a microbatch."""
    training, part, held = config.training, measured.part_of(share), measured.held
    own = [(name, p) for name, p in measured.model.named_parameters() if share._replace(tied=False).has(name)]
    updated = [(name, p) for name, p in own if p.requires_grad]
    of_optimizer = sum(local_part(p).numel() * state_bytes(name, p, config.optimizer) for name, p in updated)
    states = MemoryEstimate(sum(local_bytes(p) for _, p in own), 0, of_optimizer, 0, 0)
    kept, gradients, last = dict[int, int](), dict[int, int](), len(received) - 1
    for number, blocks in share.stages.items():
        stage = share._replace(stages={number: blocks}, embed=number == 0, head=number == last)
        kept[number] = sum(held.kept[measured.layers.stands_for[name]] for name in blocks) + size_of(received[number])
        gradients[number] = DTYPES[training.mixed_precision_reduce].itemsize * unsharded(config, whole, stage)
    gathered = DTYPES[training.mixed_precision_param].itemsize * unsharded(config, whole, share, frozen=True)
    always = gathered + 2 * max(map(size_of, received))  # what arrives and leaves meanwhile
    layers = part_of(measured.layers, share)
    of_layers = sum(held.kept[equal] for equal in layers.stands_for.values())
    passes = through_layers(layers, held, MemoryEstimate(0, 0, 0, 0, 0))

    def working(phase: str) -> int:
        """The most beside what all layers keep, in a stage's forward or backward pass; the loss can be in either."""
        phases = (phase, "loss") if share.head else (phase,)
        return max((each.memory.total for each in passes if each.phase in phases), default=of_layers) - of_layers

    phases = {"F": ("forward", working("forward")), "B": ("backward", working("backward"))}
    moments = []
    for action, activations, made in pipeline.held_after(order, kept, gradients):
        phase, beside = phases[action.kind]
        memory = states._replace(gradients=made, activations=activations + always, working=beside)
        moments.append(Moment(phase, f"stage {action.stage}, microbatch {action.number}", memory))
    update = states._replace(gradients=sum(local_bytes(p) for _, p in updated), working=round(measured.update.working * part))
    return [*moments, Moment("update", "optimizer", update)]


def work_of(share: StageAssignment, degree: int, measured: Measured, recorded: Recorder, received: list[list[Tensor]]) -> Work:
    """What a rank of a pipeline computes and sends in a step; of the update, in proportion to its parameters."""
    own, part = part_of(measured.layers, share), measured.part_of(share)
    often = {"embed": int(share.embed), "head": int(share.head)}
    passes = recorded.work(lambda scope: own.times(scope) if scope in own.few else often.get(scope, 1))
    updated = {
        channel: Traffic(each.calls, round(each.size * part), round(each.sent * part))
        for channel, each in measured.update.work.traffic.items()
    }
    # each stage sends what the next one receives, and the gradients of what it has received itself
    onwards = [tensor for number in share.stages for tensor in ([*received, []][number + 1])]
    back = [tensor for number in share.stages for tensor in received[number] if tensor.requires_grad]
    messages, size = (measured.microbatches * each for each in (len(onwards + back), size_of(onwards + back)))
    messages_sent = {Channel("pipeline: hidden states", "send", ("pp",), degree): (messages, size)}
    if share.tied and (share.embed or share.head):
        size = local_bytes(dict(measured.model.named_parameters())["embed.weight"])
        messages_sent[Channel("pipeline: gradient of the tied embedding", "send", ("pp",), degree)] = 1, size
    sent = Work(0, {channel: Traffic(calls, size, size) for channel, (calls, size) in messages_sent.items()})
    work = passes.plus(Work(round(measured.update.work.flops * part), updated)).plus(sent)
    return work._replace(traffic={channel: each for channel, each in work.traffic.items() if each.calls})


def part_of(layers: Layers, share: StageAssignment) -> Layers:
    """The layers of a rank of a pipeline; all of the few are still run."""
    return layers._replace(stands_for={name: layers.stands_for[name] for blocks in share.stages.values() for name in blocks})


def compiler_decides(config: Config) -> bool:
    """Whether the compiler chooses what is recomputed, and so how many FLOPs a step has."""
    by_budget = config.activation_checkpoint.mode == "memory_budget" and config.compile.enable
    return by_budget or compiler_recomputes(config)


def compiles(config: Config, component: str) -> bool:
    """Whether a prediction has a part compiled. 2.11's partitioner counts the FLOPs of no grouped queries, and fails."""
    return config.compile.enable and component in config.compile.components and not BEFORE_2_13


def as_measured(config: Config) -> Config:
    """The same run with an attention kernel that this machine has, and where blocks are compiled, without inductor's code: they
    are partitioned as inductor does it, and the operations of both graphs run one by one."""
    attention = "math" if config.model.attention == "math" else "auto"  # the one kernel that keeps all scores
    register_backend()
    compile = Compile(enable=True, components=["model"], backend=PARTITIONED) if compiles(config, "model") else Compile()
    config = config.model_copy(update={"compile": compile})
    return config.with_keys({"model.attention": attention, "parallelism.enable_async_tensor_parallel": False})


def offloaded(held: MicrobatchMemory) -> MicrobatchMemory:
    """The same where the host keeps the inputs of blocks: on the device are those of the block that runs, and of one before."""
    names = ["embed", *held.kept, "head"]
    gone = {name: sum(held.kept.get(before, 0) for before in names[: max(0, at - 1)]) for at, name in enumerate(names)}
    peaks = {scope: peak - gone[scope.split()[1]] for scope, peak in held.peaks.items()}
    return held._replace(kept=dict.fromkeys(held.kept, 0), peaks=peaks)


def whole_update(layers: Layers, setup: Setup) -> Update:
    """The update of the whole model, from those of one layer of each kind of parameters, and of one more of each."""
    ones = [equals[0] for equals in layers.same]
    # Muon sends matrices in buckets, of which a few layers do not fill one, and an optimizer of the user's may do so too. And
    # no more are run than the model has.
    if setup.config.optimizer.name not in ("AdamW", "Adam") or (len(ones) + 1) ** 2 > len(layers.stands_for):
        return measure_update(setup, [*layers.stands_for])
    first = whole = measure_update(setup, ones)
    for equals in (equals for equals in layers.same if len(equals) > 1):
        more, count = measure_update(setup, [*ones, equals[1]]), len(equals) - 1
        whole = Update(
            whole.state + count * (more.state - first.state),
            whole.working + count * (more.working - first.working),
            whole.work.plus(more.work, count).plus(first.work, -count),
        )
    return whole
