"""What a rank of a pipeline will hold: its schedule is rehearsed, and a stage is measured as a model of its own.

Rehearsed are the orders of work that PyTorch's schedules give their ranks. A stage begins when the hidden states that it needs
are there; sending takes no time.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.parallel.pipeline import STAGES_OF_A_RANK, costs, split_layers
from titanlite.registry.family import Family, family_of


def stage_costs(config: Config, family: Family, model: Decoder) -> list[float]:
    """The multiplications of each stage for a token, as in `costs`."""
    layers, (blocks, of_head) = split_layers(config, family, model), costs(config, family, model)
    sums = [sum(blocks[name] for name in names) for names in layers]
    return [*sums[:-1], sums[-1] + of_head]


class Rehearsal(NamedTuple):
    """A step of a pipeline."""

    bubble: float  # the share of the step in which a rank waits, of all ranks together
    ends: dict[tuple[str, int, int], float]  # when (F or B, stage, microbatch) ends


class Action(NamedTuple):
    """A pass of a microbatch through a stage."""

    kind: str  # "F", forward; "B", backward
    stage: int
    number: int  # of the microbatch


def orders(schedule: str, ranks: int, microbatches: int, stages: int) -> list[list[Action]]:
    """The actions of each rank in their order. stages: of all ranks. Needs a process group; a fake one will do.

    PyTorch's schedules with several stages a rank have lists, which they run. Those with one are loops; the list that "1F1B"
    has beside its loop lacks a forward pass in 2.13.
    """
    if STAGES_OF_A_RANK[schedule] > 1:
        return _listed(schedule, ranks, microbatches, stages)

    def of_rank(rank: int) -> Iterator[Action]:
        ahead = passes_ahead(schedule, ranks, microbatches, rank=rank)
        for number in range(ahead):
            yield Action("F", rank, number)
        for number in range(microbatches):
            yield Action("B", rank, number)
            if ahead + number < microbatches:
                yield Action("F", rank, ahead + number)

    return [[*of_rank(rank)] for rank in range(ranks)]


def passes_ahead(schedule: str, ranks: int, microbatches: int, stages: int = 1, rank: int = 0) -> int:
    """How many forward passes a rank has done before its first backward pass. stages: of a rank."""
    if schedule in ("GPipe", "LoopedBFS"):
        return microbatches * stages
    # arXiv:2104.04473, section 2.2
    return min(microbatches * stages, ranks - rank if stages == 1 else 2 * (ranks - rank - 1) + (stages - 1) * ranks + 1)


def _listed(schedule: str, ranks: int, microbatches: int, stages: int) -> list[list[Action]]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    parts: Any = [PipelineStage(nn.Identity(), number, stages, torch.device("cpu")) for number in range(0, stages, ranks)]
    order = get_schedule_class(schedule)(parts, n_microbatches=microbatches, loss_fn=lambda *_: None).pipeline_order
    return [
        [Action(str(each.computation_type.value), each.stage_index, each.microbatch_index) for each in order[rank] if each]
        for rank in range(ranks)
    ]


def held_after(order: list[Action], kept: Mapping[int, int], gradients: Mapping[int, int]) -> Iterator[tuple[Action, int, int]]:
    """(an action of a rank, bytes kept for backward passes, bytes of gradients) after each action, and before backward passes.

    kept: by each stage, for a microbatch. gradients: of each stage, which its first backward pass makes.
    """
    held, made, begun = 0, 0, set[int]()
    for action in order:
        if action.kind == "B":
            yield action, held, made
            held, made = held - kept[action.stage], made + (0 if action.stage in begun else gradients[action.stage])
            begun.add(action.stage)
        else:
            held += kept[action.stage]
        yield action, held, made


def rehearse(order: list[list[Action]], forward: Sequence[float], backward: Sequence[float]) -> Rehearsal:
    """Plays a step. forward, backward: what a stage takes.

    Raises UserError if no rank can go on.
    """
    done: dict[tuple[str, int, int], float] = {}
    busy, last = 0.0, len(forward) - 1
    clocks, left = [0.0] * len(order), [deque(actions) for actions in order]
    while any(left):
        ready = [rank for rank, actions in enumerate(left) if actions and done.keys() >= {*needs_of(*actions[0], last)}]
        if not ready:
            stuck = ", ".join(f"rank {rank} before {actions[0]}" for rank, actions in enumerate(left) if actions)
            raise UserError(f"the schedule deadlocks: {stuck}")
        for rank in ready:
            action = left[rank].popleft()
            took = (forward if action.kind == "F" else backward)[action.stage]
            clocks[rank] = max([clocks[rank], *(done[each] for each in needs_of(*action, last))]) + took
            done[action], busy = clocks[rank], busy + took
    return Rehearsal(1 - busy / (len(order) * max(clocks)), done)


def needs_of(kind: str, stage: int, number: int, last: int) -> list[tuple[str, int, int]]:
    """What must be done before an action: the same forward pass of the stage before, or the backward pass of the next one."""
    if kind == "F":
        return [("F", stage - 1, number)] if stage else []
    return [("F", stage, number), *([("B", stage + 1, number)] if stage < last else [])]


def flat(config: Config, memory: bool = False) -> Config:
    """A run of which each rank has all blocks, and which does for a block what a stage of the pipeline does.

    Embedding and head, which are on different ranks, are then two parameters. memory: gathered parameters, which
    a pipeline keeps between microbatches, are freed, to be counted apart from what each microbatch keeps.
    """
    alone: dict[str, Any] = {"pipeline_parallel_degree": 1, "reduce_every_microbatch": False}
    alone["fsdp_reshard_after_forward"] = "always" if memory else "never"
    update: dict[str, Any] = {"parallelism": config.parallelism.model_copy(update=alone)}
    if getattr(family_of(config.model).config, "tied_embeddings", False):
        overrides = {**config.model.overrides, "tied_embeddings": False}
        update["model"] = config.model.model_copy(update={"overrides": overrides})
    return config.model_copy(update=update)
