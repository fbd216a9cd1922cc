"""The seconds of a step, in closed form: matmuls by a roofline, collectives by the links that their ranks have.

FSDP's collectives run behind the computation of a neighboring layer, which they slow down; those of tensor, context and
expert parallelism are waited for. Left out: other kernels than listed, stragglers, a shared network, input and checkpoints.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from titanlite.config.tables import StrictModel
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import Positive, read_toml, validated
from titanlite.parallel.mesh import largest_share
from titanlite.plan.experts import any_of
from titanlite.plan.pipeline import passes_ahead
from titanlite.plan.report import GIB, RESERVE
from titanlite.plan.shape import ExpertShape, Layer, Shape

Rate = Annotated[float, Field(gt=0, le=1e9)]
RateOrNone = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(gt=0, le=1)]
_FILE = Path(__file__).with_name("devices.toml")
LINK = 0.8  # of a link's bandwidth that NCCL's large collectives reach (nccl-tests on an HGX H100: 360 of 450 GB/s)
_NETWORK_HOP = 14e-6  # seconds of latency between neighbors of a ring that are on two nodes (NCCL's tuning.cc, Simple)
_TILE = 128  # rows and columns of a matmul's result that one SM computes
_CONTENTION = 0.18  # of a GPU that a collective takes from matmuls: NCCL's 24 channels occupy as many of an H100's 132 SMs
_CPU_TILE = 16  # a vector of 16 float32; a CPU computes no waves
ASYNC_TP = 0.4  # of the collectives of tensor parallelism that remain exposed where 6 of a block's 8 overlap
ASYNC_TP_FLOAT8 = 0.8  # where 2 of 8 do (docs/guides/parallelism.md)
_FLOAT8 = 0.75  # of the matmul rate in bfloat16 that float8 reaches, both relative to their peaks
_STREAMS = 7  # hidden states of a block's fused kernels, beside results of matmuls: 2 for each norm, 3 for the residual
_UNFUSED = 2  # times the bytes where operations run one by one: 1.9 in llama3
_EXPERTS = 0.84  # of the rate of one matmul that those of experts reach with 1,000 rows each (SimuMax's table of a B200)
_LOGITS = 32  # bytes for each logit, fitted; titanlite reads and writes 2 and 4 bytes a few times
RECOMPUTE = ("none", "selective", "full")  # modes of activation_checkpoint that plan knows
HEAD = "head"  # in Device.host_milliseconds: all of a microbatch that is in no block


class Device(StrictModel):
    """An entry of devices.toml, or of a file of `titanlite plan --calibrate`, in the units of its keys. 0: unknown, or none."""

    driver_name: str = ""  # as torch.cuda.get_device_name() spells it
    bf16_tflops: Rate
    fp8_tflops: RateOrNone
    memory_gib: Rate
    memory_gb_per_second: Rate
    nvlink_gb_per_second: RateOrNone
    network_gb_per_second: RateOrNone
    sms: Positive
    matmul: Share
    attention: Share
    float32_tflops: RateOrNone = 0.0  # at the same shares
    hop_microseconds: Rate = 3.4  # of latency between neighbors of a ring (NCCL's tuning.cc, Simple over NVLink)
    launch_microseconds: Rate = 4.0  # of a matmul that nothing hides
    cpu_ranks: Annotated[int, Field(ge=0, le=2**20)] = 0  # of a CPU: ranks that shared it when it was measured
    # of a CPU, which begins an operation when the last one has ended: what a block and microbatch take beside their work, by
    # recomputation and by the dimension of the mesh that all ranks were in
    host_milliseconds: dict[str, dict[str, RateOrNone]] = Field(default_factory=dict)

    @property
    def reserve(self) -> int:
        """Bytes of a rank that no tensor shows: on a CPU the program and its libraries."""
        return GIB // 2 if self.cpu_ranks else RESERVE

    def check(self, name: str, ranks: int, node: int) -> None:
        """Raises UserError for ranks of which the entry does not know the links or, on a CPU, the share of each."""
        if self.cpu_ranks not in (0, ranks):
            shared = f"was measured with {self.cpu_ranks} ranks, which share the processors"
            raise UserError(f"--device {name}: {shared}; measure again with titanlite plan --calibrate --ranks {ranks}")
        if self.cpu_ranks and not self.host_milliseconds:
            raise UserError(f"--device {name}: has no host_milliseconds; measure again with titanlite plan --calibrate")
        links = {"nvlink": (self.nvlink_gb_per_second, node > 1), "network": (self.network_gb_per_second, ranks > node)}
        if ranks > 1 and (missing := [key for key, (known, used) in links.items() if used and not known]):
            remedy = f"set {missing[0]}_gb_per_second in it, the bandwidth of a GPU in one direction, or calibrate with --ranks"
            raise UserError(f"--device {name}: the links between {ranks} GPUs, {node} on a node, are unknown; {remedy}")


def devices() -> dict[str, Device]:
    shipped = read_toml(_FILE)
    del shipped["peaks"]
    found: dict[str, Device] = validated(dict[str, Device], shipped, _FILE.name)
    return found


def peak_flops_of(driver_name: str) -> float | None:
    """The dense FLOP/s in bfloat16 of a GPU by the name that its driver gives, or None if it is unknown."""
    return next((tflops * 1e12 for part, tflops in read_toml(_FILE)["peaks"].items() if part in driver_name), None)


def shipped_as(driver_name: str) -> str | None:
    """The name in devices.toml of a GPU, by the whole name that its driver gives: other forms of it have other links."""
    return next((name for name, known in devices().items() if driver_name and known.driver_name == driver_name), None)


def device_named(name: str) -> Device:
    """A device of devices.toml, or that of a file. Raises UserError for neither."""
    known = devices()
    if name in known:
        return known[name]
    if not name.endswith(".toml"):
        raise UserError(f"--device {name}: must be one of {', '.join(known)}, or FILE.toml of titanlite plan --calibrate")
    found: dict[str, Device] = validated(dict[str, Device], read_toml(name), name)
    if len(found) != 1:
        raise UserError(f"{name}: has {len(found)} tables; a file for --device has one")
    return next(iter(found.values()))


class Choice(NamedTuple):
    """A mesh and what is chosen with it. schedule: of a pipeline. microbatch: sequences. recompute: of blocks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    schedule: str = "1F1B"
    microbatch: int = 1
    recompute: str = "none"  # "selective" or "full"
    ep_node: int = 1  # ranks of a node, to which a token is sent once (parallelism.expert_parallel_node_size)
    reshard: bool = True  # without a pipeline, parameters are gathered for the backward pass again (ZeRO-3)

    @property
    def replicas(self) -> int:
        """Ranks with their own data."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.pp * self.replicas * self.cp * self.tp


class Stages(NamedTuple):
    """How a pipeline divides a model."""

    of_rank: int  # stages of a rank
    blocks: int  # of the rank that has the most
    slowest: float  # rank, relative to the mean

    @classmethod
    def of(cls, blocks: Sequence[int], costs: Sequence[float], ranks: int) -> "Stages":
        """blocks, costs: of each stage, of which a rank has every `ranks`-th one."""
        theirs, work = ([sum(each[rank::ranks]) for rank in range(ranks)] for each in (blocks, costs))
        return cls(-(-len(blocks) // ranks), int(max(theirs)), max(work) * ranks / sum(work))


def one_stage(degree: int, schedule: str) -> Stages:
    """Of a job without a pipeline."""
    assert degree == 1, "the job does not say how a pipeline divides it"
    return Stages(1, 0, 1.0)


class Job(NamedTuple):
    """What every mesh computes alike."""

    shape: Shape
    device: Device
    node: int  # GPUs of a node
    seq_len: int
    global_batch: int  # sequences
    float8: bool = False
    compiled: bool = True
    exposed_tp: float = 1.0  # of the collectives of tensor parallelism, what is waited for; less with async TP
    weight_bytes: int = 4  # of a value of the parameters that the optimizer updates
    state_bytes: float = 8.0  # that the optimizer and an EMA keep for a parameter's value, on average
    reduce_bytes: int = 4  # of a gradient while it is reduced
    item: int = 2  # bytes of a value that is computed: bfloat16, or 4 of float32
    gathered: int = 2  # bytes of a value of the blocks' parameters that FSDP gathers
    once: bool = False  # parameters are gathered and gradients reduced once a step, not with each microbatch
    replicas_each: bool = False  # gradients are all-reduced over replicas with each microbatch, not once a step
    tied: bool = False  # embedding and head are one parameter, whose gradient is all-reduced so in any case
    stages: Callable[[int, str], Stages] = one_stage  # of so many ranks with a schedule

    @property
    def peak(self) -> float:
        """FLOP/s of matmuls that are not float8."""
        return (self.device.bf16_tflops if self.item == 2 else self.device.float32_tflops) * 1e12

    def microbatches(self, choice: Choice) -> int:
        return self.global_batch // (choice.replicas * choice.microbatch)


class Seconds(NamedTuple):
    """A step of the slowest rank. Of communication, what it waits for."""

    matmuls: float
    attention: float
    elementwise: float
    fsdp: float
    tp: float
    cp: float
    ep: float
    bubble: float  # and unequal stages
    sends: float  # between stages
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def ring(job: Job, ranks: int, stride: int, size: float) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes in all. stride: between the numbers of neighboring ranks."""
    if ranks == 1:
        return 0.0
    together = max(1, min(ranks, job.node // stride))  # in a node, where each has a network card
    inside, outside = job.device.nvlink_gb_per_second, together * job.device.network_gb_per_second
    bandwidth = (outside if together == 1 else inside if together == ranks else min(inside, outside)) * LINK * 1e9
    nodes = ranks // together
    # each of ranks - 1 steps waits for a hop, of which nodes - 1 cross the network (NCCL's tuning.cc)
    latency = job.device.hop_microseconds * 1e-6 * (ranks - nodes) + _NETWORK_HOP * (nodes - 1)
    return size * (ranks - 1) / ranks / bandwidth + latency


def send(job: Job, ranks: int, size: float) -> float:
    """Seconds of `size` bytes to the next stage. ranks: of the whole mesh, of which stages are the outermost dimension."""
    inside = ranks <= job.node
    bandwidth = job.device.nvlink_gb_per_second if inside else job.device.network_gb_per_second
    return size / (bandwidth * LINK * 1e9) + (job.device.hop_microseconds * 1e-6 if inside else _NETWORK_HOP)


def all_to_all(job: Job, ranks: int, size: float, stride: int = 1) -> float:
    """Seconds in which a rank sends `size` bytes, in equal parts, to `ranks` ranks. stride: between their numbers."""
    if ranks == 1:
        return 0.0
    together = max(1, min(ranks, job.node // stride))
    device, away = job.device, ranks - together
    inside = size * (together - 1) / ranks / (device.nvlink_gb_per_second * LINK * 1e9) if together > 1 else 0.0
    outside = size * away / ranks / (device.network_gb_per_second * LINK * 1e9) if away else 0.0
    return max(inside, outside) + (_NETWORK_HOP if away else device.hop_microseconds * 1e-6) * math.log2(ranks)


def matmul(job: Job, tokens: float, rows: float, columns: float, batch: int = 1, float8: bool = False) -> float:
    """Seconds of `batch` matmuls (tokens, columns) x (columns, rows), in whole waves of tiles."""
    side = _CPU_TILE if job.device.cpu_ranks else _TILE
    tiles = math.ceil(tokens / side) * math.ceil(rows / side) * batch
    waves = math.ceil(tiles / job.device.sms) * job.device.sms
    peak = job.device.fp8_tflops * 1e12 * _FLOAT8 if float8 else job.peak
    computed = 2 * waves * side * side * columns / (peak * job.device.matmul)
    moved = job.item * batch * (tokens * columns + rows * columns + tokens * rows) / (job.device.memory_gb_per_second * 1e9)
    return max(computed, moved) + job.device.launch_microseconds * 1e-6


class Pass(NamedTuple):
    """Seconds of the forward pass of a layer and a microbatch on a rank; collectives apart from FSDP's are waited for."""

    matmuls: float
    elementwise: float
    tp: float
    cp: float
    ep: float


@functools.cache
def reached(experts: ExpertShape, parts: int) -> float:
    """Of `parts` equal parts of the experts, those that have some of a token's, on average over balanced routing."""
    return parts * any_of(experts.number // parts, experts.number, experts.top_k)


def forward(job: Job, layer: Layer, choice: Choice) -> Pass:
    shape, tp = job.shape, choice.tp
    tokens = choice.microbatch * job.seq_len / choice.cp
    own, hidden = tokens / tp, job.item * tokens * shape.dim  # between blocks the sequence is split; bytes of hidden states
    seconds, values = 0.0, _STREAMS * shape.dim * own
    for rows, columns, split in (each[:3] for each in layer.matrices for _ in range(each.times)):
        many = tokens if split else own  # without a style, each rank of tp multiplies its own tokens
        out, into = rows / (tp if split == "column" else 1), columns / (tp if split == "row" else 1)
        seconds += matmul(job, many, out, into, float8=job.float8)
        # results are read; the inputs of "row", such as the rotated queries and the activations, are written
        values += many * (out + (into if split == "row" else 0))
        if job.float8:  # inputs are read for their scale, read again, and written in half the bytes
            values += 2.5 * many * into
    exchanged = 0.0
    if experts := layer.experts:
        copies = own * experts.top_k  # rows of a rank, of any experts
        local = experts.number // choice.ep
        seconds += 3 * matmul(job, copies / local, experts.hidden, shape.dim, local) / _EXPERTS
        values += copies * (3 * shape.dim + 3 * experts.hidden)
        nodes, within = choice.ep // choice.ep_node, choice.ep_node
        of_ranks, of_nodes = (job.item * own * shape.dim * reached(experts, number) for number in (choice.ep, nodes))
        if within == 1:
            exchanged = 2 * all_to_all(job, choice.ep, of_ranks)
        else:
            exchanged = 2 * (all_to_all(job, nodes, of_nodes, within) + all_to_all(job, within, of_ranks))
    elementwise = job.item * values / (job.device.memory_gb_per_second * 1e9) * (1 if job.compiled else _UNFUSED)
    gathers = 2 * sum(each.times * (each.split == "row") for each in layer.matrices)
    waits = gathers * ring(job, tp, 1, hidden) * job.exposed_tp
    keys = job.item * choice.microbatch * job.seq_len * layer.keys / tp
    return Pass(seconds, elementwise, waits, ring(job, choice.cp, tp, keys), exchanged)


def host_seconds(job: Job, choice: Choice) -> float:
    """Of a step on a CPU: what Python, dispatch and hooks take. What a compiled block computes again is compiled too."""
    degrees = {"tp": choice.tp, "dp_shard": choice.dp_shard * choice.cp, "dp_replicate": choice.dp_replicate}
    used = [name for name, degree in degrees.items() if degree > 1] or ["dp_shard"]
    block, head = (
        max(job.device.host_milliseconds.get(kind, {}).get(name, 0.0) for name in used)
        for kind in ("none" if job.compiled else choice.recompute, HEAD)
    )
    return job.microbatches(choice) / choice.pp * (job.shape.depth * block + head) * 1e-3


def sharded(job: Job, layer: Layer, choice: Choice) -> tuple[float, float]:
    """Seconds of FSDP's all-gather of a layer, and of its reduce-scatter."""
    dense, experts = layer.dense_parameters / choice.tp, layer.expert_parameters(job.shape.dim) / choice.ep
    group = choice.dp_shard * choice.cp

    def both(itemsize: int, of_expert: int) -> float:
        if choice.ep == 1:  # all that a rank of tensor parallelism has is one collective
            return ring(job, group, choice.tp, dense * itemsize + experts * of_expert)
        apart = ring(job, group * choice.tp // choice.ep, choice.ep, experts * of_expert) if experts else 0.0
        return ring(job, group, choice.tp, dense * itemsize) + apart

    return both(job.gathered, job.item), both(job.reduce_bytes, job.reduce_bytes)


def copied(job: Job, layer: Layer, choice: Choice) -> tuple[float, float]:
    """Seconds in which FSDP copies what it has gathered out of the buffer of a collective, and gradients into one."""
    if choice.dp_shard * choice.cp == 1:
        return 0.0, 0.0
    dense, experts = layer.dense_parameters / choice.tp, layer.expert_parameters(job.shape.dim) / choice.ep
    bandwidth = job.device.memory_gb_per_second * 1e9
    gathered = 2 * (dense * job.gathered + experts * job.item)
    return gathered / bandwidth, (dense + experts) * (job.item + job.reduce_bytes) / bandwidth


def overlapped(collective: float, busy: float) -> float:
    """Seconds that a collective adds to computation of `busy` seconds that runs at the same time."""
    return max(0.0, collective - busy) + _CONTENTION * min(collective, busy)


def step(job: Job, choice: Choice) -> Seconds:
    """A step of one rank. choice must divide the ranks, the batch and the model."""
    shape, device, microbatches = job.shape, job.device, job.microbatches(choice)
    tokens = choice.microbatch * job.seq_len / choice.cp
    attention = shape.attention * tokens / choice.tp / (job.peak * device.attention) / shape.depth
    attention *= 1 + (1 / 3 if choice.recompute == "full" else 0)
    parts, fsdp, gathers, reduces = [0.0] * 5, 0.0, 0.0, 0.0
    once = choice.pp > 1 or job.once
    for layer, often in shape.layers:
        ahead = forward(job, layer, choice)
        # The backward pass has twice the matmuls; what is recomputed comes on top. "selective" keeps reduce-scatters and
        # all-to-alls, and repeats all-gathers: half of what tensor parallelism waits for, and the keys and values.
        # "full" repeats the first of two reduce-scatters.
        again, repeats = layer.recomputed(shape.dim, choice.recompute), choice.recompute != "none"
        of_tp = {"none": 2.0, "selective": 2.5, "full": 2.75}[choice.recompute]
        often_run = (3 + again, 3 + repeats, of_tp, 2 + repeats, 2 + (choice.recompute == "full"))
        for index, (each, times) in enumerate(zip(ahead, often_run, strict=True)):
            parts[index] += often * each * times
        if layer.experts and choice.ep == 1:  # each rank of tensor parallelism has all: gradients of their matrices are summed
            parts[2] += often * 6 * ring(job, choice.tp, 1, job.item * layer.expert_parameters(shape.dim) / 3)
        gather, reduce = sharded(job, layer, choice)
        gathers, reduces = gathers + often * gather, reduces + often * reduce
        if not once:
            out, into = copied(job, layer, choice)
            fsdp += often * (out * (1 + choice.reshard) + into)
            # gloo takes the processors that compute: nothing is hidden there
            busy = 0.0 if device.cpu_ranks else ahead.matmuls + ahead.elementwise + attention / 3
            behind = busy * (2 + again) + (0.0 if device.cpu_ranks else ahead.tp)
            fsdp += often * (overlapped(gather, busy) + overlapped((gather if choice.reshard else 0.0) + reduce, behind))
    parts[0] += shape.others * tokens / choice.tp / (job.peak * device.matmul)
    head = 3 * matmul(job, tokens, shape.vocab / choice.tp, shape.dim)
    logits = _LOGITS * tokens * shape.vocab / choice.tp / (device.memory_gb_per_second * 1e9)
    stages = job.stages(choice.pp, choice.schedule)
    own = [microbatches * each / choice.pp for each in (*parts, attention * shape.depth)]
    own[1] += host_seconds(job, choice)
    whole = sum(own) + microbatches * (head + logits) / choice.pp
    # the slowest rank's own work, and a pass of each other rank before and after it
    bubble = whole * (stages.slowest - 1 + (choice.pp - stages.slowest) / (stages.of_rank * microbatches))
    if once:  # gathered once, reduced once, and only a part of it behind computation
        fsdp = (gathers + reduces) / choice.pp / 2
    else:
        fsdp *= microbatches
    edge = choice.dp_shard * choice.cp
    of_embeddings = shape.embeddings / choice.tp * (job.item + job.reduce_bytes) / choice.pp
    fsdp += ring(job, edge, choice.tp, of_embeddings) * (1 if once else microbatches)
    values = parameters_of_rank(job, choice)

    def replicas(size: float) -> float:
        return 2 * ring(job, choice.dp_replicate, edge * choice.tp, job.reduce_bytes * size)

    # the last microbatch's backward pass hides the rest
    reduced = overlapped(replicas(values), 0.0 if device.cpu_ranks else whole / microbatches / 2)
    fsdp += reduced
    if not once:
        of_tied = replicas(shape.embeddings / (choice.tp * edge)) if job.tied else 0.0
        fsdp += (microbatches - 1) * (reduced if job.replicas_each else of_tied)
    sends = 0.0
    if choice.pp > 1:
        sends = 2 * microbatches * stages.of_rank * send(job, choice.ranks, job.item * tokens * shape.dim / choice.tp)
    # parameters, gradients and state are read, all but gradients written; the norm reads gradients once more
    update = (4 * job.weight_bytes + 2 * job.state_bytes) * values / (device.memory_gb_per_second * 1e9)
    of_head = microbatches / choice.pp
    return Seconds(
        own[0] + head * of_head, own[5], own[1] + logits * of_head, fsdp, own[2], own[3], own[4], bubble, sends, update
    )


def parameters_of_rank(job: Job, choice: Choice) -> float:
    """Parameters that a rank updates, on average over a pipeline."""
    shape, shards = job.shape, choice.dp_shard * choice.cp
    dense = shape.embeddings + sum(often * each.dense_parameters for each, often in shape.layers)
    # tensor parallelism does not split experts; expert parallelism splits them over all ranks of a replica
    of_experts, held = shards * choice.tp // choice.ep if choice.ep > 1 else shards, 0.0
    for each, often in shape.layers:
        if each.experts:
            rows = (each.experts.hidden, shape.dim, each.experts.hidden)  # of an expert's matrices
            shares = [largest_share((each.experts.number // choice.ep, size, 1), of_experts) for size in rows]
            held += often * each.expert_parameters(shape.dim) / choice.ep * sum(shares) / 3
    return (dense / (choice.tp * shards) + held) / choice.pp


def memory(job: Job, choice: Choice) -> float:
    """Bytes that the fullest rank of a mesh holds, roughly: within MEMORY_ERROR of what `titanlite estimate` measures."""
    shape, microbatches, piped = job.shape, job.microbatches(choice), choice.pp > 1
    tokens = choice.microbatch * job.seq_len / (choice.cp * choice.tp)
    stages = job.stages(choice.pp, choice.schedule)
    share = stages.blocks if piped else shape.depth  # blocks of a rank
    states = (2 * job.weight_bytes + job.state_bytes) * parameters_of_rank(job, choice)
    kept, widest, gradients, stay = 0.0, 0.0, 0.0, 0.0
    for layer, often in shape.layers:
        rows = sum(each.times * each.rows for each in layer.matrices)
        copies = layer.experts.top_k * (shape.dim + 2 * layer.experts.hidden) if layer.experts else 0
        # What matmuls and norms read. Uncompiled blocks keep the results of other operations too, tensor parallelism what it
        # gathers: 52 GiB by estimate of Llama 70B on pp 4 x cp 4 x tp 2.
        once = job.item * (4 * shape.dim + rows + copies) * tokens
        every = once if job.compiled and choice.tp == 1 else 2 * once
        part = {"none": every, "selective": 0.45 * once, "full": job.item * shape.dim * tokens}[choice.recompute]
        kept += part * often / shape.depth * share
        dense, experts = layer.dense_parameters / choice.tp, layer.expert_parameters(shape.dim) / choice.ep
        weights = dense + experts
        widest = max(widest, 2 * every + 2 * job.item * weights + job.reduce_bytes * weights)
        gradients += job.reduce_bytes * weights * often / shape.depth * share
        stay += (job.gathered * dense + job.item * experts) * often / shape.depth * share
    if piped:  # gathered parameters and their whole gradients stay
        held = passes_ahead(choice.schedule, choice.pp, microbatches, stages.of_rank) / stages.of_rank
        return states + kept * held + widest + stay + gradients
    head = (job.item + 2 * job.reduce_bytes) * shape.dim * shape.vocab / choice.tp
    if choice.reshard or choice.dp_shard * choice.cp == 1:
        stay = 0.0
    return states + kept + stay + max(widest, head) + 2 * 2**30
