"""Rotary positions, and their scalings for sequences longer than those of pretraining.

A scaling lowers the frequencies of rotation, so that positions beyond the original length rotate queries and keys as
the model knows. `SCALINGS` lists what there is; docs/reference/rope.md says which to choose.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.attention import Cache, SeqInfo

# ------------------------------------------------------------------------------------------------------------ scalings


class LinearScaling(NamedTuple):
    """Divides all frequencies (position interpolation: Chen et al., arXiv:2306.15595)."""

    factor: float


class DynamicScaling(NamedTuple):
    """Raises the base with the length of the current text, so that the lowest frequency is divided by factor x length /
    max_positions - (factor - 1), and the highest is kept ("Dynamic NTK": Peng et al., arXiv:2309.00071, section 3.3; the
    formula is that of transformers). For generation and evaluation only.
    """

    factor: float
    max_positions: int  # texts up to this length are not scaled


class YarnScaling(NamedTuple):
    """Keeps frequencies that turn more than beta_fast times within the original length, divides those that turn less than
    beta_slow times, and interpolates between (Peng et al., arXiv:2309.00071, definition 2, with the bounds of section 3.2).

    Queries and keys are multiplied by attention_factor; None: 0.1 ln(factor) + 1 (section 3.4), or, with both mscales, the
    ratio of 0.1 mscale ln(factor) + 1 for each (DeepSeek-V2, arXiv:2405.04434, section 3.1.4, and its config.json).
    """

    factor: float
    original_max_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # rounds the bounds between the three ranges outwards to whole dimensions


class LongRopeScaling(NamedTuple):
    """Divides each frequency by a factor of its own, found by search (LongRoPE: Ding et al., arXiv:2402.13753).

    Texts that are longer than original_max_positions have the long factors, others the short ones. Queries and keys are
    multiplied by attention_factor; None: sqrt(1 + ln(factor) / ln(original_max_positions)).
    """

    short_factor: tuple[float, ...]  # one for each pair of head dimensions
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float | None = None
    factor: float | None = None  # by how much the length grows; only attention_factor follows from it


class Llama3Scaling(NamedTuple):
    """Divides the frequencies of wavelengths above original_max_positions / low_freq_factor, keeps those of wavelengths below
    original_max_positions / high_freq_factor, and interpolates between (Llama 3, arXiv:2407.21783, section 3.4.2; the formula
    is that of its published code).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling
# By their rope_type in config.json.
SCALINGS: dict[str, Any] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "llama3": Llama3Scaling,
}


def check_scaling(scaling: RopeScaling | None, head_dim: int, theta: float) -> None:
    """Raises ValueError for a scaling that contradicts itself, the size of a head, or the base."""
    numbers = {} if scaling is None else scaling._asdict()
    for name, value in numbers.items():
        values = value if isinstance(value, tuple) else (value,)
        if not all(each is None or (math.isfinite(each) and each > 0) for each in values if not isinstance(each, bool)):
            raise ValueError(f"{name} = {value}: must be finite and greater than 0")
    match scaling:
        case Llama3Scaling(_, low, high, _) if low >= high:
            raise ValueError(f"low_freq_factor = {low}: must be less than high_freq_factor = {high}")
        case YarnScaling(beta_fast=fast, beta_slow=slow) if slow > fast:
            raise ValueError(f"beta_slow = {slow}: must be at most beta_fast = {fast}")
        case YarnScaling() if theta <= 1:
            raise ValueError(f"a YaRN scaling needs rope_theta > 1; here {theta}")
        case YarnScaling(mscale=one, mscale_all_dim=other) if (one is None) != (other is None):
            raise ValueError(f"mscale = {one} and mscale_all_dim = {other}: one has no effect without the other")
        case DynamicScaling(factor=factor) if factor < 1 or head_dim < 4:
            raise ValueError(f"a dynamic scaling needs factor >= 1 and head_dim >= 4; here {factor} and {head_dim}")
        case LongRopeScaling(short, long, original, attention, factor):
            for name, factors in (("short_factor", short), ("long_factor", long)):
                if len(factors) != head_dim // 2:
                    raise ValueError(f"{name}: has {len(factors)} numbers, must have head_dim / 2 = {head_dim // 2}")
            if attention is None and factor is None:
                raise ValueError("a longrope scaling needs factor or attention_factor")
            if original < 2:
                raise ValueError(f"original_max_positions = {original}: must be at least 2")


# -------------------------------------------------------------------------------------------------------- the rotation


class TextCache(Cache):
    """A cache for generation that knows the length of each text, by which `DynamicScaling` and `LongRopeScaling` scale.

    The lengths are final ones, with all tokens that may yet come: keys in the cache are not rotated again.
    """

    def __init__(self, lengths: Tensor):  # (batch,) int64
        super().__init__()
        self.lengths = lengths


def rotation(seq: SeqInfo, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a sequence's positions for `apply_rope`: two float32 tensors (batch, seq, 1, head_dim)."""
    frequencies, factor = rope_frequencies(head_dim, theta, scaling, _lengths(seq, scaling))
    return rope_tables(seq.positions, frequencies, factor)


def _lengths(seq: SeqInfo, scaling: RopeScaling | None) -> Tensor:
    """The length of each row's text, (batch,) or (1,). In training, it is the length of the samples, whatever is in them."""
    if seq.cache is None or not isinstance(scaling, DynamicScaling | LongRopeScaling):
        return seq.positions.new_full((1,), seq.positions.shape[1] if seq.split is None else seq.split.length)
    assert isinstance(seq.cache, TextCache), "a scaling by the length of the text needs a TextCache"
    return seq.cache.lengths


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, lengths: Tensor) -> tuple[Tensor, float]:
    """(angular frequency of each pair of head dimensions, factor of cosines and sines) (Su et al., arXiv:2104.09864).

    lengths: (rows,), of the texts, on the device of the result. The frequencies are float32, (head_dim / 2,), or
    (rows, 1, head_dim / 2) where they depend on the length. They are computed in the order of transformers' operations, since
    at position 100,000 a difference of one rounding is an angle of 0.01.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=lengths.device) / head_dim
    frequencies = 1.0 / theta**exponents
    match scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case Llama3Scaling():
            return _llama3(frequencies, scaling), 1.0
        case DynamicScaling(factor, most):
            growth = factor * lengths.clamp(min=most) / most - (factor - 1)
            return 1.0 / (theta * growth ** (head_dim / (head_dim - 2)))[:, None, None] ** exponents, 1.0
        case YarnScaling():
            first, last = _yarn_bounds(head_dim, theta, scaling)
            pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=lengths.device)
            keep = 1 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
            return 1.0 / (scaling.factor * theta**exponents) * (1 - keep) + frequencies * keep, attention_factor(scaling)
        case LongRopeScaling(short, long, original):
            is_long = (lengths > original)[:, None, None]
            factors = torch.where(is_long, _on_device(long, lengths.device), _on_device(short, lengths.device))
            return 1.0 / (factors * theta**exponents), attention_factor(scaling)


def rope_tables(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (batch, seq), times a factor: float32 (batch, seq, 1, head_dim), both halves equal."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def attention_factor(scaling: YarnScaling | LongRopeScaling) -> float:
    """The factor of queries and keys, so that its square is that of the scores."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = 0.0 if scaling.factor is None else math.log(max(scaling.factor, 1.0))
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + growth / math.log(scaling.original_max_positions)) if growth else 1.0
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    return 0.1 * growth + 1


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # rotations within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_bounds(head_dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """The pairs of head dimensions between which frequencies are interpolated: the last kept, and the first divided."""
    first, last = (
        head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001


def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers as float32, without a host sync."""
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# -------------------------------------------------------------------------------------------------------- Hugging Face

# Of a table of RoPE in config.json; other names are those of the scaling's own fields.
_THEIR_NAMES = {"original_max_positions": "original_max_position_embeddings"}


def rope_from_hf(json: dict[str, Any], default_base: float = 10_000.0) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of a config.json of Hugging Face; for families with one table of RoPE.

    default_base: the base that transformers takes for this model_type if the file has none.

    As in transformers, rope_scaling, the older name, replaces rope_parameters, a base in the table replaces the one outside of
    it, and an original length outside of the table the one in it. Raises ValueError for an unknown or contradictory scaling.
    """
    table = json.get("rope_scaling") or json.get("rope_parameters") or {}
    outside = json.get("rope_theta", default_base)
    kind = table.get("rope_type", table.get("type", "default"))
    original = json.get("original_max_position_embeddings") if kind in ("llama3", "yarn", "longrope") else None
    return float(table.get("rope_theta", outside)), scaling_from_hf(table, json, original)


def scaling_from_hf(table: dict[str, Any], json: dict[str, Any], original: int | None = None) -> RopeScaling | None:
    """The scaling of a table of RoPE in a config.json. original: the original length, instead of the table's."""
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ValueError(f"rope_type = {kind!r}: must be default, {', '.join(SCALINGS)}")
    if kind == "dynamic":
        return DynamicScaling(table["factor"], json["max_position_embeddings"])
    values = {name: _read(table, name) for name in SCALINGS[kind]._fields}
    if "original_max_positions" in values:
        values["original_max_positions"] = original or values["original_max_positions"] or json["max_position_embeddings"]
    if kind == "longrope" and values["factor"] is values["attention_factor"] is None:
        values["factor"] = json["max_position_embeddings"] / values["original_max_positions"]
    required = [name for name in SCALINGS[kind]._fields if name not in SCALINGS[kind]._field_defaults]
    if missing := [_THEIR_NAMES.get(name, name) for name in required if values[name] is None]:
        raise ValueError(f"rope_type = {kind!r}: has no {', '.join(missing)}")
    return SCALINGS[kind](**{name: value for name, value in values.items() if value is not None})


def _read(table: dict[str, Any], name: str) -> Any:
    value = table.get(_THEIR_NAMES.get(name, name))
    return tuple(value) if isinstance(value, list) else value


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of a config.json for `rope_from_hf`."""
    lengths = {"max_position_embeddings": scaling.max_positions} if isinstance(scaling, DynamicScaling) else {}
    return {"rope_theta": theta, "rope_scaling": None if scaling is None else _table_of(scaling), **lengths}


def _table_of(scaling: RopeScaling) -> dict[str, Any]:
    """The table of a config.json for `scaling_from_hf`. The length of a dynamic scaling is outside of it."""
    kind = next(name for name, each in SCALINGS.items() if isinstance(scaling, each))
    values = {_THEIR_NAMES.get(name, name): value for name, value in scaling._asdict().items() if name != "max_positions"}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {"rope_type": kind, **{name: value for name, value in values.items() if value is not None}}
