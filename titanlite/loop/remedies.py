"""Ways to save memory, the cheapest first: one table, for the error when memory runs out and for the check before a start."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from titanlite.config.read import toml_value
from titanlite.config.schema import Config


class Remedy(NamedTuple):
    """One way. keys: (configuration, sequences of a step over all ranks) -> the keys to set; {} where they are in use already,
    or have no effect. saves: what a training step needs, the gradients, or what a rank keeps between steps."""

    keys: Callable[[Config, int], dict[str, Any]]
    cost: str
    saves: Literal["activations", "gradients", "state"]


def _recompute(config: Config, _: int) -> dict[str, Any]:
    mode = {"none": "selective", "full": ""}.get(config.activation_checkpoint.mode, "full")
    return {"activation_checkpoint.mode": mode} if mode else {}


def _microbatches(config: Config, global_batch: int) -> dict[str, Any]:
    local = config.training.local_batch_size
    smaller = local // next((n for n in range(2, local + 1) if local % n == 0), 1)
    return {"training.local_batch_size": smaller, "training.global_batch_size": global_batch} if local > 1 else {}


def _chunks(config: Config, _: int) -> dict[str, Any]:
    cfg = config.activation_checkpoint
    able = cfg.mode == "full" and cfg.sequence_chunks == 1 and config.parallelism.tensor_parallel_degree == 1
    return {"activation_checkpoint.sequence_chunks": 8} if able else {}


def _offload(config: Config, _: int) -> dict[str, Any]:
    cfg = config.activation_checkpoint
    return {"activation_checkpoint.offload": True} if cfg.mode == "full" and not cfg.offload else {}


def _reduce(config: Config, _: int) -> dict[str, Any]:
    late = not config.parallelism.reduce_every_microbatch and config.parallelism.pipeline_parallel_degree == 1
    return {"parallelism.reduce_every_microbatch": True} if late else {}


def _narrower(config: Config, _: int) -> dict[str, Any]:
    training = config.training
    able = training.dtype != "bfloat16" and training.mixed_precision_param == "bfloat16" and not config.lora.enable
    return {"training.dtype": "bfloat16"} if able else {}


def _fewer_replicas(config: Config, _: int) -> dict[str, Any]:
    keys = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1}
    return keys if config.parallelism.data_parallel_replicate_degree > 1 else {}


REMEDIES = (
    Remedy(_recompute, "a part of the forward pass is computed twice", "activations"),
    Remedy(_microbatches, "more microbatches a step, the same mathematics", "activations"),
    Remedy(_chunks, "feed-forward layers hold a part of the sequence at a time", "activations"),
    Remedy(_offload, "the inputs of blocks are kept in the host's memory", "activations"),
    Remedy(_reduce, "sharded gradients between microbatches, more communication", "gradients"),
    Remedy(_narrower, "half of the bytes of parameters, gradients and moments", "state"),
    Remedy(_fewer_replicas, "parameters are split over the ranks of all replicas, more communication", "state"),
)


def remedies(config: Config, global_batch: int, training: bool = True) -> list[str]:
    """Ways that are not in use yet, the cheapest first. global_batch: sequences of a step over all ranks.

    training: False before the first step, where nothing is held for a backward pass yet.
    """
    of_table = ((keys, each) for each in REMEDIES if (keys := each.keys(config, global_batch)))
    ways = [f"{spelled(keys)}: {each.cost}" for keys, each in of_table if training or each.saves == "state"]
    offload = "" if config.parallelism.cpu_offload else "; or parallelism.cpu_offload = true, which is slower"
    return [*ways, f"a larger parallelism.data_parallel_shard_degree, on more GPUs{offload}"]


def spelled(keys: dict[str, Any]) -> str:
    """`training.dtype = "bfloat16"`"""
    return " with ".join(f"{key} = {toml_value(value)}" for key, value in keys.items())
