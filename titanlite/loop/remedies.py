"""Ways to save memory, the cheapest first: one table, for the error when memory runs out and for the check before a start."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from models.decoder import Decoder
from titanlite.config.conflicts import conflicts
from titanlite.config.effects import Hardware
from titanlite.config.read import toml_value
from titanlite.config.schema import Config
from titanlite.optim import build
from titanlite.parallel import pipeline
from titanlite.transforms import activation_checkpoint, float8


class Remedy(NamedTuple):
    """One way. keys: (configuration, sequences of a step over all ranks) -> the keys to set; {} where there are none.
    saves: what a training step needs, the gradients, or what a rank keeps between steps."""

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
    return {"activation_checkpoint.sequence_chunks": 8} if config.activation_checkpoint.sequence_chunks == 1 else {}


def _set(key: str, value: Any) -> Callable[[Config, int], dict[str, Any]]:
    return lambda *_: {key: value}


def _fewer_replicas(config: Config, _: int) -> dict[str, Any]:
    keys = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1}
    return keys if config.parallelism.data_parallel_replicate_degree > 1 else {}


REMEDIES = (
    Remedy(_recompute, "a part of the forward pass is computed twice", "activations"),
    Remedy(_microbatches, "more microbatches a step, the same mathematics", "activations"),
    Remedy(_chunks, "feed-forward layers hold a part of the sequence at a time", "activations"),
    Remedy(_set("activation_checkpoint.offload", True), "the inputs of blocks are kept in the host's memory", "activations"),
    Remedy(
        _set("parallelism.reduce_every_microbatch", True),
        "sharded gradients between microbatches, more communication",
        "gradients",
    ),
    Remedy(_set("training.dtype", "bfloat16"), "half of the bytes of parameters, gradients and moments", "state"),
    Remedy(_fewer_replicas, "parameters are split over the ranks of all replicas, more communication", "state"),
)


_CONFLICTS = (*build.CONFLICTS, *float8.CONFLICTS, *pipeline.CONFLICTS)
OFFLOAD = {"parallelism.cpu_offload": True}


def helps(config: Config, keys: dict[str, Any], cuda: bool) -> bool:
    """Whether these keys are new to a run, have an effect and are not refused beside its others."""
    changed = config.with_keys(keys)
    idle = {f"{key.section}.{key.name}" for key in changed.idle(Hardware(cuda))}
    before, after = ({*conflicts(each, _CONFLICTS), *activation_checkpoint.faults(each)} for each in (config, changed))
    return changed != config and idle.isdisjoint(keys) and after <= before


def ways(config: Config, global_batch: int, cuda: bool) -> Iterator[tuple[dict[str, Any], Remedy]]:
    """The keys of each way that helps, the cheapest first. global_batch: sequences of a step over all ranks."""
    found = ((each.keys(config, global_batch), each) for each in REMEDIES)
    yield from ((keys, each) for keys, each in found if helps(config, keys, cuda))


def remedies(config: Config, global_batch: int, cuda: bool, model: Decoder | None) -> list[str]:
    """The same in words, without those that the model refuses. model: None before it is built, where nothing is held for a
    backward pass yet."""
    found = [each for each in ways(config, global_batch, cuda) if model is not None or each[1].saves == "state"]
    if model is not None:
        found = [each for each in found if not list(activation_checkpoint.model_faults(config.with_keys(each[0]), model))]
    offload = f"; or {spelled(OFFLOAD)}, which is slower" if helps(config, OFFLOAD, cuda) else ""
    more = f"a larger parallelism.data_parallel_shard_degree, on more GPUs{offload}"
    return [*(f"{spelled(keys)}: {each.cost}" for keys, each in found), more]


def spelled(keys: dict[str, Any]) -> str:
    """`training.dtype = "bfloat16"`"""
    return " with ".join(f"{key} = {toml_value(value)}" for key, value in keys.items())
