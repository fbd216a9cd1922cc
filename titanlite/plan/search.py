"""The meshes of so many ranks, by the predicted time of a step or by memory."""

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from titanlite.parallel.mesh import DEGREES, equal_parts
from titanlite.plan.report import GIB
from titanlite.plan.time import RECOMPUTE, Choice, Job, Seconds, memory, step

Objective = Literal["tokens_per_second", "memory"]
_MICROBATCHES = (1, 2, 4, 8, 16)
_SHORTEST = 1024  # tokens of a rank: with fewer, context parallelism splits what is short already
SCHEDULES = {1: "1F1B", 2: "Interleaved1F1B"}  # by the stages of a rank
_COSTS = {
    "matmuls": "in matmuls",
    "attention": "in attention",
    "elementwise": "in norms, activations and logits",
    "fsdp": "waiting for FSDP's all-gathers and reduce-scatters, and copying for them",
    "tp": "waiting for the collectives of tensor parallelism",
    "cp": "waiting for keys and values of context parallelism",
    "ep": "waiting for the all-to-alls of experts",
    "bubble": "in the pipeline bubble and unequal stages",
    "sends": "sending between stages",
    "optimizer": "in the optimizer",
}
_WAITS = ("fsdp", "tp", "cp", "ep", "bubble", "sends")


class Candidate(NamedTuple):
    """A choice with its prediction. memory: bytes, roughly. measured: bytes by `estimate`, of the first sound one."""

    choice: Choice
    seconds: Seconds
    memory: float
    measured: int | None = None

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.choice[:6]


def candidates(job: Job, ranks: int, objective: Objective) -> list[Candidate]:
    """Every choice that divides the model and, roughly, fits the memory, the best first."""
    sizes = ((choice, memory(job, choice)) for choice in choices(job, ranks))
    found = [Candidate(choice, step(job, choice), size) for choice, size in sizes if size <= room_of(job)]
    return sorted(found, key=lambda each: each.memory if objective == "memory" else each.seconds.total)


def room_of(job: Job) -> float:
    """Bytes of a device for what `memory` and `estimate` count."""
    return job.device.memory_gib * GIB - job.device.reserve


def choices(job: Job, ranks: int) -> Iterator[Choice]:
    """Every choice that divides the ranks, the model and the batch."""
    shape = job.shape
    experts = [layer.experts.number for layer, _ in shape.layers if layer.experts]
    for pp, cp, tp in itertools.product(_divisors(ranks), repeat=3):
        if ranks % (pp * cp * tp) or pp > shape.depth or tp > 4 * job.node or not _splits(job, tp, cp):
            continue
        data = ranks // (pp * cp * tp)
        for replicas in _divisors(data) if job.global_batch % data == 0 else ():
            shards = data // replicas * cp * tp
            for ep in _divisors(shards) if experts else [1]:
                if not any(number % ep for number in experts):
                    mesh = Choice(pp, replicas, data // replicas, cp, tp, ep)
                    yield from _passes(job, mesh)
                    if 1 < job.node < ep and ep % job.node == 0:
                        yield from _passes(job, mesh._replace(ep_node=job.node))


def _splits(job: Job, tp: int, cp: int) -> bool:
    """Whether tensor and context parallelism divide the matrices and the sequence."""
    if job.seq_len % equal_parts(cp, tp) or (cp > 1 and job.seq_len // cp < _SHORTEST):
        return False
    matrices = [each for layer, _ in job.shape.layers for each in layer.matrices if each.split]
    return not any((each.rows if each.split == "column" else each.columns) % tp for each in matrices)


def _passes(job: Job, mesh: Choice) -> Iterator[Choice]:
    for microbatch, recompute in itertools.product(_MICROBATCHES, RECOMPUTE):
        microbatches, rest = divmod(job.global_batch, mesh.replicas * microbatch)
        for stages in SCHEDULES if mesh.pp > 1 else (1,):
            filled = mesh.pp == 1 or (microbatches >= mesh.pp and (stages == 1 or microbatches % mesh.pp == 0))
            if rest == 0 and filled and mesh.pp * stages <= job.shape.depth:
                yield mesh._replace(stages=stages, microbatch=microbatch, recompute=recompute)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


NODE_SIZE = "parallelism.expert_parallel_node_size"
CHOSEN = (
    *(f"parallelism.{DEGREES[name]}" for name in Choice._fields[:6]),
    *("training.local_batch_size", "activation_checkpoint.mode", "parallelism.pipeline_parallel_schedule"),
    NODE_SIZE,
)


def keys_of(choice: Choice) -> dict[str, Any]:
    """The keys that a choice sets; the schedule only with a pipeline, the size of a node only with split experts."""
    values = (*choice[:6], choice.microbatch, choice.recompute, SCHEDULES[choice.stages], choice.ep_node)
    without = {CHOSEN[-2]: choice.pp == 1, NODE_SIZE: choice.ep == 1}
    return {key: value for key, value in zip(CHOSEN, values, strict=True) if not without.get(key, False)}


def name_of(choice: Choice) -> str:
    """Such as "dp_shard 8 x tp 8, microbatch 2, recompute full"."""
    degrees = zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), choice[:5], strict=True)
    mesh = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "1 rank"
    parts = [mesh, *_experts(choice), f"microbatch {choice.microbatch}"]
    schedule = [SCHEDULES[choice.stages]] if choice.pp > 1 else []
    return ", ".join([*parts, *schedule, f"recompute {choice.recompute}"])


def _experts(choice: Choice) -> list[str]:
    if choice.ep == 1:
        return []
    return [f"ep {choice.ep}" + (f" by nodes of {choice.ep_node}" if choice.ep_node > 1 else "")]


def why(candidate: Candidate) -> str:
    """The largest wait of a step."""
    seconds = candidate.seconds
    largest = max(_WAITS, key=lambda name: getattr(seconds, name))
    return f"{getattr(seconds, largest) / seconds.total:.0%} of the step {_COSTS[largest]}"


def shares(seconds: Seconds) -> list[str]:
    """The costs of a step, the largest first."""
    rows = sorted(seconds._asdict().items(), key=lambda row: -row[1])
    return [f"{value / seconds.total:6.1%}  {_COSTS[name]}" for name, value in rows if value > 0]
