"""Checks a run against `LIMITS`, in which a family's file declares what it cannot do."""

from collections.abc import Iterator

from models.decoder import Decoder, Limits
from titanlite.config.schema import Config

_WHY = {
    "causal": "the result of a token depends on later tokens",
    "generates": "it does not keep what later tokens need",
    "stages": "its blocks cannot be cut into pipeline stages",
    "tensor_parallel": "more ranks cannot share it",
}


def _says(limits: Limits, name: str) -> str:
    """A declaration in words, such as `declares LIMITS["stages"] = False: its blocks cannot be cut into pipeline stages`."""
    return f'declares LIMITS["{name}"] = {getattr(limits, name)}: {_WHY[name]}'


def no_generation(limits: Limits) -> str:
    """Why a family cannot generate or score texts; "" if it can."""
    return next((_says(limits, name) for name in ("generates", "causal") if not getattr(limits, name)), "")


def refused_dimensions(limits: Limits, degrees: dict[str, int]) -> dict[str, str]:
    """The dimensions of a mesh, such as {"tp": 2}, on which a family cannot run, each with the reason."""
    refused = {
        "tp": ("tensor_parallel", limits.tensor_parallel is not None and degrees.get("tp", 1) > limits.tensor_parallel),
        "cp": ("causal", not limits.causal and degrees.get("cp", 1) > 1),
        "pp": ("stages", not limits.stages and degrees.get("pp", 1) > 1),
    }
    return {dimension: _says(limits, name) for dimension, (name, is_refused) in refused.items() if is_refused}


def reads_padding(config: Config, limits: Limits) -> str:
    """Why a row must be full; "" where no token attends to the padding after it."""
    if limits.causal or config.training.document_mask:
        return ""
    return f"{config.model.name} {_says(limits, 'causal')}, so text would attend to the padding after it"


def faults(config: Config, model: Decoder) -> Iterator[str]:
    """The keys of a configuration that need more than the family's LIMITS allow."""
    name, limits, training = config.model.name, model.limits, config.training
    keys = {"tp": "tensor_parallel_degree", "cp": "context_parallel_degree", "pp": "pipeline_parallel_degree"}
    degrees = {dimension: getattr(config.parallelism, key) for dimension, key in keys.items()}
    for dimension, reason in refused_dimensions(limits, degrees).items():
        most = limits.tensor_parallel if dimension == "tp" else 1
        yield f"parallelism.{keys[dimension]} = {degrees[dimension]}: {name} {reason}; it must be at most {most}"
    if config.validation.sample_prompts and (reason := no_generation(limits)):
        yield f"validation.sample_prompts: {name} {reason}; set it to []"
    if training.document_policy != "pack" and (why := reads_padding(config, limits)):
        remedy = 'use "pack", or "best_fit" with document_mask = true'
        yield f'training.document_policy = "{training.document_policy}": {why}; {remedy}'
