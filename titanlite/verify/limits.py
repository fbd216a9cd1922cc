"""What `titanlite check-model` requires of `LIMITS`: a run that needs what a family declares unsupported is refused."""

from functools import partial
from typing import Any

from titanlite.config.read import Faults
from titanlite.config.schema import Config, Model
from titanlite.ground.errors import UserError
from titanlite.inference.generate import Sampling, generate, score
from titanlite.loop.checks import check
from titanlite.parallel.mesh import DEGREES, ranks_of
from titanlite.registry.family import Family
from titanlite.registry.limits import no_generation, refused_dimensions
from titanlite.verify.small_runs import NotRun

_PROMPT = {"validation": {"enable": True, "sample_prompts": ["Once"]}}


class Declared(NotRun):
    """A check of what a family declares unsupported; the text says how a run is refused."""


def refused_mesh(model: Model, family: Family, degrees: dict[str, int]) -> str:
    """The message by which a run refuses a mesh that the family declares unsupported; "" if it declares nothing against it."""
    reasons = refused_dimensions(family.limits, degrees)
    return _refused(model, next(iter(reasons.values())), degrees, {}) if reasons else ""


def refused_generation(model: Model, family: Family) -> str:
    """The message by which a run with prompts is refused; "" if generation is supported. The commands must refuse it too."""
    if not (reason := no_generation(family.limits)):
        return ""
    text, whole = _refused(model, reason, {}, _PROMPT), family.on_meta()
    for call in (partial(generate, whole, [[0]], 1, (), Sampling()), partial(score, whole, [([0], [0])])):
        try:
            call()
        except UserError as error:
            if reason in str(error):
                continue
        raise UserError(f"{model.name} {reason}, and {call.func.__name__} does not refuse it")
    return text


def _refused(model: Model, reason: str, degrees: dict[str, int], sections: dict[str, Any]) -> str:
    """The fault that gives this reason. Raises UserError where a run would start."""
    parallelism = {DEGREES[name]: degree for name, degree in degrees.items()}
    config = Config.model_validate({"model": model.model_dump(), "parallelism": parallelism, **sections})
    try:
        check(config, model.name, ranks_of(degrees), open_files=False)
        faults = []
    except Faults as error:
        faults = [fault for fault in error.faults if reason in fault]
    if not faults:
        raise UserError(f"{model.name} {reason}, and a run that needs it is not refused")
    return f"refused, as checked: {faults[0]}"
