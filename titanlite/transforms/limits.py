"""What a run must not ask of a family whose file declares in `LIMITS` that it cannot do it."""

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
    """Of a mesh, such as {"tp": 2}, the dimensions on which a family cannot run, each with the reason."""
    most = limits.tensor_parallel
    refused = {
        "tp": "tensor_parallel" if most is not None and degrees.get("tp", 1) > most else "",
        "cp": "causal" if degrees.get("cp", 1) > 1 and not limits.causal else "",
        "pp": "stages" if degrees.get("pp", 1) > 1 and not limits.stages else "",
    }
    return {dimension: _says(limits, name) for dimension, name in refused.items() if name}


def faults(config: Config, model: Decoder) -> Iterator[str]:
    """Keys of a configuration that ask for what the family declares that it cannot do."""
    limits, cfg, training = model.limits, config.parallelism, config.training
    keys = {"tp": "tensor_parallel_degree", "cp": "context_parallel_degree", "pp": "pipeline_parallel_degree"}
    degrees = {dimension: getattr(cfg, key) for dimension, key in keys.items()}
    for dimension, reason in refused_dimensions(limits, degrees).items():
        most = limits.tensor_parallel if dimension == "tp" else 1
        to = f"set it to {most}" + (" or less" if most != 1 else "")
        yield f"parallelism.{keys[dimension]} = {degrees[dimension]}: {config.model.name} {reason}; {to}"
    if config.validation.sample_prompts and (reason := no_generation(limits)):
        yield f"validation.sample_prompts: {config.model.name} {reason}; set it to []"
    if not limits.causal and training.document_policy != "pack" and not training.document_mask:
        instead = '"pack"' if training.document_policy == "truncate" else '"pack", or document_mask = true'
        yield (
            f'training.document_policy = "{training.document_policy}": {config.model.name} {_says(limits, "causal")}, so text '
            f"would read the padding behind it; use {instead}"
        )
