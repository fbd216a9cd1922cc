"""An MoE model from a dense model: sparse upcycling (Komatsuzaki et al., arXiv:2212.05055, section 3).

Every expert is a copy of the dense feed-forward layer; routers have their initial values. The weights of a token's experts
sum to 1, so that the MoE model computes the same as the dense model, for any choice of its routers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from torch import Tensor

from models.rope import SCALINGS
from titanlite.ground.errors import UserError, listed
from titanlite.hf.entries import Entry, stack_of
from titanlite.registry.family import Family, load_module
from titanlite.tools.open_model import Recognized
from titanlite.transforms.initialize import fill, match_initial

# A dense family -> the MoE family that has its attention and norms.
_MOE_FAMILIES = {"llama3": "mixtral", "qwen3": "qwen3_moe"}
_FFN, _EXPERTS = ".ffn.w", ".ffn.experts.w"


class Upcycling(NamedTuple):
    """The options of the MoE model."""

    n_experts: int
    top_k: int
    seed: int  # of the routers


def moe_of(dense: Recognized, wanted: Upcycling) -> Recognized:
    """The MoE model of a dense model: a flavor of its family with other dimensions.

    Raises UserError if the dense family has none, or the MoE family lacks a dimension of the dense model.
    """
    if dense.name not in _MOE_FAMILIES:
        pairs = ", ".join(f"{name} -> {moe}" for name, moe in _MOE_FAMILIES.items())
        raise UserError(f"--upcycle-experts {wanted.n_experts}: {dense.name} has no MoE family; there are: {pairs}")
    name = _MOE_FAMILIES[dense.name]
    module, given = load_module(name), {field.name: field for field in fields(dense.family.config)}
    values = {key: getattr(dense.family.config, key) for key in given}
    taken = {field.name for field in fields(module.Config)}
    if others := [key for key in values.keys() - taken - {"ffn_dim"} if values[key] != given[key].default]:
        faults = [f"{key} = {values[key]!r}: {name} has no such dimension" for key in sorted(others)]
        raise UserError(listed(f"--upcycle-experts {wanted.n_experts}: {name} cannot hold this {dense.name}:", faults))
    kept = {key: value for key, value in values.items() if key in taken}
    try:
        config = module.Config(**kept, expert_dim=values["ffn_dim"], n_experts=wanted.n_experts, top_k=wanted.top_k)
    except ValueError as error:
        raise UserError(f"--upcycle-experts {wanted.n_experts} --top-k {wanted.top_k}: {error}") from None
    candidates = ((name, _difference(base, config)) for name, base in module.FLAVORS.items())
    flavor, overrides = min(candidates, key=lambda found: len(found[1]))
    return Recognized(name, flavor, Family(module, config), overrides)


def _difference(base: Any, config: Any) -> dict[str, Any]:
    """The `model.overrides` that turn `base` into `config`."""
    changed = [key for key in asdict(config) if getattr(base, key) != getattr(config, key)]
    return {key: _toml(getattr(config, key)) for key in changed}


def _toml(value: Any) -> Any:
    """A dimension as TOML has it: see registry/overrides.py."""
    if value is None:
        return "none"
    if kind := next((kind for kind, scaling in SCALINGS.items() if isinstance(value, scaling)), None):
        return {"rope_type": kind, **{key: _toml(entry) for key, entry in value._asdict().items()}}
    return list(value) if isinstance(value, tuple) else value


def copied(weights: Mapping[str, Sequence[Entry]], n_experts: int) -> dict[str, Sequence[Entry]]:
    """The source of each weight of the MoE model except routers: every expert reads the same dense weights."""
    result: dict[str, Sequence[Entry]] = {}
    for name, entries in weights.items():
        if _FFN not in name:
            result[name] = entries
            continue
        [entry] = entries
        result[name.replace(_FFN, _EXPERTS).removesuffix(".weight")] = [stack_of([entry] * n_experts)]
    return result


def fill_routers(tensors: Mapping[str, Tensor], family: Family, seed: int) -> None:
    """Writes their initial values to the routers, the tensors that the dense model does not have. tensors: by our names in
    checkpoints; a DTensor's local shard is written."""
    distributions, _ = match_initial(family.on_meta(), family)
    for stored, tensor in tensors.items():
        name = stored.removeprefix("model.")
        fill(tensor, name, distributions[name], seed)
