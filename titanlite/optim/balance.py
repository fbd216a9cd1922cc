"""The balance of experts: losses of the routers, a bias that follows the load, and reports of the load.

Counts are integers, summed over microbatches and ranks, so that biases are equal on every mesh, bit for bit.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.moe import Router, RouterLosses, routers_of
from titanlite.config.schema import Config


def balance_experts(
    model: nn.Module,
    config: Config,
    sequences: int,
    split: DeviceMesh,
    tp: DeviceMesh,
    together: dist.ProcessGroup | None = None,
) -> None:
    """Sets the losses and counters of the routers of a model, which is not on the meta device.

    sequences: of a global batch. split: the ranks among which those of a microbatch are split, one dimension, of which `tp` is
    a part. together: the ranks that have the same routers; None: all.
    """
    moe, group_name = config.moe, split.get_group().group_name if split.size() > 1 else ""
    balance, z = moe.balance_loss / sequences, moe.router_z_loss / (sequences * config.training.seq_len)
    # a list, so that they stay the modules of their blocks
    model.titanlite_routers = routers_of(model)  # type: ignore[assignment]
    model.titanlite_router_ranks = together  # type: ignore[assignment]
    losses = RouterLosses(balance, z, split.size(), group_name, tp.size(), tp.get_local_rank())
    for router in _counting(model):
        router.losses = losses if balance or z else None
        router.bias_update_speed = moe.bias_update_speed
        router.counts = torch.zeros(len(router.weight), dtype=torch.int64, device=split.device_type)


def begin_step(model: nn.Module) -> None:
    """Before the first microbatch of a step."""
    for router in _counting(model):
        assert router.counts is not None
        router.counts.zero_()


def move_biases(model: nn.Module, skipped: Tensor) -> None:
    """After an optimizer step: the biases follow the load of the global batch. skipped: () float32, 1 for a skipped step."""
    routers = [router for router in _counting(model) if router.bias_update_speed and router.bias is not None]
    for router, counts in zip(routers, _summed_counts(model, routers), strict=True):
        assert router.bias is not None
        # Twice the counts and the sum of all: no rounding decides which side of the mean an expert is on.
        behind = (counts.sum() - counts * len(counts)).sign()
        router.bias += behind * (1 - skipped) * router.bias_update_speed


def load(model: nn.Module, expert_ranks: int) -> dict[str, float]:
    """For the reports, of the latest step; {} without routers. All ranks together; two host syncs.

    The load of an expert is the number of its tokens relative to the mean of its layer.
    """
    every, ranges = _of_all_stages(model)
    values: dict[str, float] = {}
    loads, entropies, of_ranks, dead = [], [], [], 0
    for number, counts in enumerate(every):
        shares = counts / counts.sum().clamp(min=1)
        loads.append(float(shares.max()) * len(counts))
        entropies.append(float(torch.special.entr(shares).sum()) / math.log(len(counts)) if len(counts) > 1 else 1.0)
        of_ranks.append(float(shares.unflatten(0, (expert_ranks, -1)).sum(1).max()) * expert_ranks)
        dead += int((counts == 0).sum())
        values[f"expert_load/{number}"] = loads[-1]
    if not loads:
        return {}
    values |= {"expert_load": max(loads), "expert_entropy": min(entropies), "dead_experts": dead}
    if expert_ranks > 1:
        values["expert_rank_load"] = max(of_ranks)
    if ranges:
        values["router_bias_range"] = max(ranges)
    return values


def _of_all_stages(model: nn.Module) -> tuple[list[Tensor], list[float]]:
    """The counts of each router, on the CPU, in the order of the layers, of which a pipeline's ranks have some each; and the
    ranges of their biases, in any order."""
    routers = _counting(model)
    counts = _summed_counts(model, routers, torch.device("cpu"))
    # of some routers: a fork's layers may differ
    spreads = [router.bias.max() - router.bias.min() for router in routers if router.bias is not None]
    ranges = torch.stack(spreads).tolist() if spreads else []
    if (pipeline := getattr(model, "pipeline", None)) is None:
        return counts, ranges
    layers = [int(name.split(".")[1]) for name, module in model.named_modules() if isinstance(module, Router)]
    every = sorted(pipeline.gathered(zip(layers, counts, strict=True)), key=lambda pair: pair[0])
    return [each for _, each in every], pipeline.gathered(ranges)


def _counting(model: nn.Module) -> list[Router]:
    """The routers that `balance_experts` has found. A step does not search a large model for them, which takes milliseconds."""
    return getattr(model, "titanlite_routers", [])


def _summed_counts(model: nn.Module, routers: list[Router], device: torch.device | None = None) -> list[Tensor]:
    """The counts of each router, (experts,) int64, summed over the ranks that have it, by one all-reduce. device: of the
    result; None: the counts'."""
    counts = [router.counts for router in routers if router.counts is not None]
    if not counts:
        return []
    together = torch.cat(counts)
    dist.all_reduce(together, group=getattr(model, "titanlite_router_ranks", None))
    return list(together.to(device).split([len(each) for each in counts]))


def faults(config: Config, model: nn.Module) -> Iterator[str]:
    """Keys of [moe] for a model without routers, or without the bias that they move; precisions that lose the losses."""
    moe, routers = config.moe, routers_of(model)
    used: dict[str, Any] = {name: getattr(moe, name) for name in ("bias_update_speed", "balance_loss", "router_z_loss")}
    for name, value in used.items():
        if value and not routers:
            yield f"moe.{name} = {value:g}: {config.model.title} has no Router of models/moe.py; set it to 0"
        elif value and name == "bias_update_speed" and all(router.bias is None for router in routers):
            yield f"moe.{name} = {value:g}: the routers of {config.model.title} have no bias; set it to 0"
        elif value and name != "bias_update_speed" and config.training.mixed_precision_param == "float16":
            precision = 'training.mixed_precision_param = "float16"'
            yield f"moe.{name} = {value:g}: {precision} scales the loss, and this is not part of it; use bfloat16"
