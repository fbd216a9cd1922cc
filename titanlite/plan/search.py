"""The meshes of so many ranks, by the predicted time of a step or by memory."""

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from titanlite.parallel.mesh import DEGREES, equal_parts
from titanlite.parallel.pipeline import STAGES_OF_A_RANK
from titanlite.plan.report import GIB
from titanlite.plan.time import RECOMPUTE, Choice, Job, Seconds, memory, step

Objective = Literal["tokens_per_second", "memory"]
_LARGEST = 64  # sequences of a microbatch
_SHORTEST = 1024  # tokens of a rank: with fewer, context parallelism splits what is short already
_SCHEDULES = ("1F1B", "Interleaved1F1B")  # the others hold all microbatches, and have no smaller bubble
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


def candidates(job: Job, ranks: int, objective: Objective) -> list[Candidate]:
    """Every choice that, roughly, fits the memory, the best first."""
    sizes = ((choice, memory(job, choice)) for choice in choices(job, ranks))
    found = [Candidate(choice, step(job, choice), size) for choice, size in sizes if size <= room_of(job)]
    return sorted(found, key=lambda each: each.memory if objective == "memory" else each.seconds.total)


def room_of(job: Job) -> float:
    """Bytes of a device for what `memory` and `estimate` count."""
    return job.device.memory_gib * GIB - job.device.reserve


def choices(job: Job, ranks: int) -> Iterator[Choice]:
    """Every choice that divides the ranks, the batch, its sequences and the experts."""
    experts = [layer.experts.number for layer, _ in job.shape.layers if layer.experts]
    async_tp = job.exposed_tp < 1  # which needs NVLink between all ranks
    for pp, cp, tp in itertools.product(_divisors(ranks), repeat=3):
        divided = job.seq_len % equal_parts(cp, tp) == 0 and (cp == 1 or job.seq_len // cp >= _SHORTEST)
        if ranks % (pp * cp * tp) or pp > job.shape.depth or tp > 4 * job.node or not divided:
            continue
        if async_tp and job.node % tp:
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


def _passes(job: Job, mesh: Choice) -> Iterator[Choice]:
    share = job.global_batch // mesh.replicas
    keeps = (True, False) if mesh.pp == 1 < mesh.dp_shard * mesh.cp else (True,)  # stages keep what they have gathered
    for schedule in _SCHEDULES if mesh.pp > 1 else _SCHEDULES[:1]:
        stages = STAGES_OF_A_RANK[schedule]
        for microbatch in _divisors(share, _LARGEST) if mesh.pp * stages <= job.shape.depth else ():
            microbatches = share // microbatch
            if mesh.pp == 1 or (microbatches >= mesh.pp and (stages == 1 or microbatches % mesh.pp == 0)):
                for recompute, reshard in itertools.product(RECOMPUTE, keeps):
                    yield mesh._replace(schedule=schedule, microbatch=microbatch, recompute=recompute, reshard=reshard)


@functools.cache
def _divisors(number: int, largest: int = sys.maxsize) -> list[int]:
    return [each for each in range(1, min(number, largest) + 1) if number % each == 0]


SCHEDULE, NODE_SIZE = "parallelism.pipeline_parallel_schedule", "parallelism.expert_parallel_node_size"
RESHARD = "parallelism.fsdp_reshard_after_forward"
CHOSEN = {  # the keys that a choice sets -> its fields
    **{f"parallelism.{DEGREES[name]}": name for name in Choice._fields[:6]},
    **{"training.local_batch_size": "microbatch", "activation_checkpoint.mode": "recompute"},
    **{SCHEDULE: "schedule", NODE_SIZE: "ep_node", RESHARD: "reshard"},
}


def keys_of(choice: Choice) -> dict[str, Any]:
    """The keys that a choice sets; without those that have no effect on its mesh."""
    without = {SCHEDULE: choice.pp == 1, NODE_SIZE: choice.ep == 1, RESHARD: choice.ranks == 1}
    values = choice._asdict() | {"reshard": "default" if choice.reshard else "never"}
    return {key: values[field] for key, field in CHOSEN.items() if not without.get(key, False)}


def name_of(choice: Choice) -> str:
    """Such as "dp_shard 8 x tp 8, microbatch 2, recompute full"."""
    degrees = zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), choice[:5], strict=True)
    mesh = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "1 rank"
    parts = [mesh, *_experts(choice), f"microbatch {choice.microbatch}"]
    schedule = [choice.schedule] if choice.pp > 1 else []
    kept = [] if choice.reshard else ["no reshard"]
    return ", ".join([*parts, *schedule, f"recompute {choice.recompute}", *kept])


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
