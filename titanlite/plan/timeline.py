"""A predicted step as events for ui.perfetto.dev: a process for each stage of a pipeline, with a row of computation and one of
communication, of which only what the step waits for is drawn.

All stages take equally long, as in the closed form of time.py, so that the last event ends with the predicted step.
"""

from typing import Any

from titanlite.plan.pipeline import orders, rehearse
from titanlite.plan.step import simulated_ranks
from titanlite.plan.time import Choice, Job, step

_COMPUTES, _WAITS = 1, 2  # rows of a process
_ROWS = ((_COMPUTES, "compute"), (_WAITS, "communication"))


def events(job: Job, choice: Choice) -> list[dict[str, Any]]:
    """The entries of "traceEvents"; their times are microseconds."""
    seconds, microbatches, alone = step(job, choice), job.microbatches(choice), choice.pp == 1
    after = 0.0 if alone else seconds.fsdp + seconds.sends
    span = seconds.total - seconds.optimizer - after
    of_rank = job.stages(choice.pp, choice.schedule).of_rank
    unit = span / (of_rank * microbatches + choice.pp - 1)  # forward and backward pass of a stage and a microbatch
    computed = (seconds.matmuls + seconds.attention + seconds.elementwise) / (of_rank * microbatches)
    waited = seconds.tp + seconds.cp + seconds.ep + (seconds.fsdp if alone else 0.0)
    waited /= of_rank * microbatches
    forward = 1 / {"none": 3.0, "selective": 3.5, "full": 4.0}[choice.recompute]
    stages = choice.pp * of_rank
    with simulated_ranks(choice.pp):
        order = orders(choice.schedule, choice.pp, microbatches, stages)
    ends = rehearse(order, [forward * unit] * stages, [(1 - forward) * unit] * stages).ends
    found = [_named(rank, row, name) for rank in range(choice.pp) for row, name in ((0, f"stage {rank}"), *_ROWS)]
    for (kind, stage, number), end in ends.items():
        share, name = (forward, "forward") if kind == "F" else (1 - forward, "backward")
        begin, rank = end - share * unit, stage % choice.pp
        label = f"{name} of microbatch {number}" + (f", stage {stage}" if stages > 1 else "")
        found.append(_event(rank, _COMPUTES, label, begin, share * computed))
        found.append(_event(rank, _WAITS, f"waits in {label}", begin + share * computed, share * waited))
    for rank in range(choice.pp):
        found.append(_event(rank, _WAITS, "FSDP and sends between stages", span, after))
        found.append(_event(rank, _COMPUTES, "optimizer", span + after, seconds.optimizer))
    return [each for each in found if each["ph"] == "M" or each["dur"] > 0]


def _event(rank: int, row: int, name: str, begin: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "pid": rank, "tid": row, "name": name, "ts": begin * 1e6, "dur": seconds * 1e6}


def _named(rank: int, row: int, name: str) -> dict[str, Any]:
    kind = "thread_name" if row else "process_name"
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": {"name": name}}
