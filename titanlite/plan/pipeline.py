"""What a rank of a pipeline will hold: its schedule is rehearsed, and a stage is measured as a model of its own.

Rehearsed are the orders of work that PyTorch's schedules give their ranks. A stage begins when the hidden states that it needs
are there; sending takes no time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.config.schema import Config
from titanlite.errors import UserError


class Rehearsal(NamedTuple):
    """A step of a pipeline."""

    idle: float  # the share of the step in which a rank waits, of all ranks together
    kept: list[int]  # bytes that each rank keeps for backward passes when it keeps the most


def orders(config: Config, microbatches: int, stages: int) -> dict[int, list[Any]]:
    """The actions of each rank in their order, as PyTorch's schedule has them. Needs a process group; a fake one will do."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    kind, ranks = get_schedule_class(config.parallelism.pipeline_parallel_schedule), config.parallelism.pipeline_parallel_degree
    parts = [PipelineStage(nn.Identity(), number, stages, torch.device("cpu")) for number in range(0, stages, ranks)]
    several: Any = parts if issubclass(kind, PipelineScheduleMulti) else parts[0]
    order = kind(several, n_microbatches=microbatches, loss_fn=lambda *_: None).pipeline_order
    return {rank: [action for action in actions if action is not None] for rank, actions in order.items()}


def rehearse(
    order: dict[int, list[Any]], forward: Sequence[float], backward: Sequence[float], kept: Sequence[int]
) -> Rehearsal:
    """Plays a step. forward, backward: what a stage takes for a microbatch. kept: bytes from its forward to its backward pass.

    Raises UserError if no rank can go on.
    """
    done: dict[tuple[int, str, int], float] = {}  # when (stage, F or B, microbatch) ends
    clocks, places, held, most = [0.0] * len(order), [0] * len(order), [0] * len(order), [0] * len(order)
    last, waiting = len(forward) - 1, set(order)
    while waiting:
        moved = False
        for rank in sorted(waiting):
            for action in order[rank][places[rank] :]:
                stage, number, kind = action.stage_index, action.microbatch_index, str(action.computation_type.value)
                needs = _needs(stage, number, kind, last)
                if any(each not in done for each in needs):
                    break
                clocks[rank] = (
                    max([clocks[rank], *(done[each] for each in needs)]) + (forward if kind == "F" else backward)[stage]
                )
                done[stage, kind, number] = clocks[rank]
                held[rank] += kept[stage] if kind == "F" else -kept[stage]
                most[rank] = max(most[rank], held[rank])
                places[rank], moved = places[rank] + 1, True
            else:
                waiting.remove(rank)
        if waiting and not moved:
            stuck = {rank: str(order[rank][places[rank]]) for rank in sorted(waiting)}
            raise UserError(f"the schedule stops: ranks wait for each other before these actions: {stuck}")
    busy = sum((forward if kind == "F" else backward)[stage] for stage, kind, _ in done)
    return Rehearsal(1 - busy / (len(order) * max(clocks)), most)


def _needs(stage: int, number: int, kind: str, last: int) -> list[tuple[int, str, int]]:
    """What must be done before an action: the same forward pass of the stage before, or the backward pass of the next one."""
    if kind == "F":
        return [(stage - 1, "F", number)] if stage else []
    return [(stage, "F", number), *([(stage + 1, "B", number)] if stage < last else [])]


def gathered_once(config: Config) -> bool:
    """Whether a pipeline keeps gathered parameters between microbatches."""
    return config.parallelism.fsdp_reshard_after_forward in ("default", "never")


def flat(config: Config, memory: bool = False) -> Config:
    """A run of which each rank has all blocks, and which does for a block what a stage of the pipeline does.

    memory: parameters that a pipeline keeps gathered are freed, to be counted apart from what each microbatch keeps.
    """
    alone: dict[str, Any] = {"pipeline_parallel_degree": 1, "reduce_every_microbatch": False}
    if gathered_once(config):
        alone["fsdp_reshard_after_forward"] = "always" if memory else "never"
    return config.model_copy(update={"parallelism": config.parallelism.model_copy(update=alone)})
