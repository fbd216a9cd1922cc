"""Initial weights as a function of (seed, parameter name, position in the whole parameter).

Each rank computes its own shard only. The values depend neither on the number of ranks nor on the device: they come from a hash
of positions (transforms/shards.py), a table look-up, and single IEEE operations, which CPU and CUDA execute alike.
"""

import functools
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import get_args

import torch
from torch import Tensor, nn

from models.blocks import Computed, Constant, Distribution, Identity, Normal, Uniform
from models.decoder import Decoder
from titanlite.ground.errors import UserError
from titanlite.registry.family import Family
from titanlite.transforms.parameters import allocate, every_layer, match_scale, match_table
from titanlite.transforms.shards import box_index, global_offset, key_of, local_part, splitmix64

_TABLE_BITS = 14  # steps of the tabulated inverse distribution, with linear interpolation between them
_FRACTION_BITS = 24  # the mantissa of a float32
# Values made at a time. On a CPU, int64 temporaries stay in the cache. On a GPU, where they take 128 MiB each, a chunk is some
# 25 kernel launches; the CPU's chunks would be 1.5 million launches for 8B.
_CHUNK = {"cpu": 2**17, "cuda": 2**24}


def initialize(model: Decoder, family: Family, seed: int, device: torch.device, offload: bool = False) -> None:
    """Gives a sharded meta-device model memory on `device` and its initial weights. offload: parameters are in host memory.

    Raises UserError naming each parameter or buffer that the family's `initial` table does not cover.
    """
    materialize(model, torch.device("cpu") if offload else device)
    for module in model.modules() if offload else ():  # FSDP2 moves parameters alone to the device
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    distributions, faults = match_initial(model, family, whole=getattr(model, "pipeline", None) is None)
    if faults:
        raise UserError("\n".join(faults))
    for name, tensor in named_tensors(model):
        fill(tensor, name, distributions[name], seed)
    unset = [name for name, tensor in named_tensors(model) if local_part(tensor).isnan().any()]
    assert not unset, f"not initialized: {unset}"


def match_initial(model: nn.Module, family: Family, whole: bool = True) -> tuple[dict[str, Distribution], list[str]]:
    """The distribution of every parameter and buffer by name, and the faults of three tables of the family: `initial`;
    `init_scale`, which is applied here; and `lr_scale`, which `build_optimizer` applies.

    whole: False for stages of a pipeline, in which a pattern may match nothing.
    A model is built without memory, which loses what a constructor computes into a buffer: a buffer can only be constant.
    """
    named = dict(named_tensors(model))
    # distributions of modules that the framework has substituted, such as those with an adapter
    substituted = [(path, module.own_initial()) for path, module in model.named_modules() if hasattr(module, "own_initial")]
    own = {f"{path}.{name}": how for path, initial in substituted for name, how in initial.items()}
    others = [name for name in named if name not in own]
    distributions, faults = match_table(family.module.initial(family.config), others, "initial", whole)
    if getattr(family.config, "mup_base_dim", None) is not None and not family.scale("lr_scale"):  # a fork of parts of a family
        faults.append("mup_base_dim: has no effect without lr_scale and init_scale in the family's file; see models/llama3.py")
    for table in ("init_scale", "lr_scale"):
        factors, wrong = match_scale(family.scale(table), others, table, whole)
        faults += wrong
        for name, factor in factors.items() if table == "init_scale" and not wrong else ():
            if factor != 1.0 and name in distributions:
                distributions[name] = _scaled(distributions[name], factor)
                if distributions[name] is None:
                    faults.append(f"init_scale: {every_layer(name)} is neither Normal nor Uniform; scale it in initial")
    distributions |= own
    for name, tensor in named.items():
        distribution = distributions.get(name)
        if not isinstance(distribution, Distribution | None):
            kinds = ", ".join(kind.__name__ for kind in get_args(Distribution))
            faults.append(f"initial: {every_layer(name)} has {distribution!r}; models/blocks.py offers {kinds}")
        elif not isinstance(tensor, nn.Parameter) and not isinstance(distribution, Constant | None):
            lost = "the meta device loses what its constructor computes; compute it in forward"
            faults.append(f"initial: {every_layer(name)} is a buffer, and must be a Constant: {lost}")
        elif tensor.ndim == 0 and isinstance(tensor, nn.Parameter):
            faults.append(f"initial: {every_layer(name)} has no dimension, which FSDP cannot shard; give it one of size 1")
        elif isinstance(distribution, Identity) and tensor.ndim < 2:
            faults.append(f"initial: {every_layer(name)} is Identity, which is for matrices, and has {tensor.ndim} dimension")
        elif isinstance(distribution, Computed):
            faults.extend(f"initial: {every_layer(name)} {fault}" for fault in _computed_faults(distribution, tensor))
    return distributions, list(dict.fromkeys(faults))


def _scaled(distribution: object, factor: float) -> Distribution | None:
    """The distribution with `factor` times its deviation; None for one that has none."""
    if isinstance(distribution, Normal):
        return distribution._replace(std=distribution.std * factor)
    return Uniform(*(bound * factor for bound in distribution)) if isinstance(distribution, Uniform) else None


def _computed_faults(distribution: Computed, tensor: Tensor) -> Iterator[str]:
    """Evaluates a function at a few positions, together and one by one, as meshes evaluate it on shards."""
    positions = torch.linspace(0, max(0, tensor.numel() - 1), 8, dtype=torch.float64).long()
    together = _computed(distribution, positions, tuple(tensor.shape))
    apart = torch.cat([_computed(distribution, position, tuple(tensor.shape)) for position in positions.split(1)])
    if not together.isfinite().all():
        yield f"is Computed as {together.tolist()}, which is not finite"
    elif not torch.equal(together, apart):
        yield "is Computed differently for several positions than for one; compute each value from its own index alone"


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocates a meta-device module, filled with NaN, so that a value that is never set shows."""
    allocate(module, device)
    for _, tensor in named_tensors(module):
        if tensor.is_floating_point():
            local_part(tensor).fill_(float("nan"))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and all buffers; a tied parameter once, under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def fill(tensor: Tensor, name: str, distribution: Distribution, seed: int) -> None:
    """Writes a parameter's initial values (of a DTensor those of the local shard), rounded to its dtype."""
    local = local_part(tensor)
    if isinstance(distribution, Constant):
        local.fill_(distribution.value)
        return
    values = _values_at(distribution, key_of(f"{seed}/{name}"), tuple(tensor.shape), local.device)
    # A shard is a box of the whole parameter. It is filled a few rows at a time; a row is all but the first dimension.
    base, inner = box_index(tuple(tensor.shape), global_offset(tensor), tuple(local.shape), local.device)
    rows = max(1, _CHUNK[local.device.type] // max(1, inner.numel()))
    flat = local.view(local.shape[0], -1) if local.numel() else local
    for start in range(0, local.shape[0] if local.numel() else 0, rows):
        flat[start : start + rows] = values(base[start : start + rows, None] + inner)


def _values_at(
    distribution: Normal | Uniform | Identity | Computed, key: int, shape: tuple[int, ...], device: torch.device
) -> Callable[[Tensor], Tensor]:
    """The function from int64 positions in the flattened parameter to its values, float32."""
    if isinstance(distribution, Normal):
        steps, heights = (part.to(device) for part in _normal_table(distribution.cutoff))
        return lambda index: _normal(index, key, steps, heights) * distribution.std
    if isinstance(distribution, Uniform):
        low, high = distribution
        # Separate operations, as in `_normal`; the clamp because low + (high - low) may be rounded to above high.
        return lambda index: _fraction(splitmix64(index, key)).mul_(high - low).add_(low).clamp_(low, high)
    if isinstance(distribution, Identity):
        rows, columns = shape[-2:]
        return lambda index: (index // columns % rows == index % columns) * distribution.scale
    return lambda index: _computed(distribution, index, shape)


def _computed(distribution: Computed, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The values that a function computes at int64 positions; on the CPU, whose functions are the same for all meshes."""
    values = distribution.values(torch.unravel_index(index.cpu(), shape), shape)
    return torch.as_tensor(values, dtype=torch.float64).expand(index.shape).float().to(index.device)


def _normal(index: Tensor, key: int, steps: Tensor, heights: Tensor) -> Tensor:
    """Standard normal values, float32, for int64 positions."""
    bits = splitmix64(index, key)
    step = (bits >> _FRACTION_BITS) & (2**_TABLE_BITS - 1)
    # Separate operations: a fused multiply-add rounds once, and only some devices have it.
    return _fraction(bits).mul_(heights[step]).add_(steps[step])


def _fraction(bits: Tensor) -> Tensor:
    """Uniform values of [0, 1), float32, from the low bits of a hash."""
    return (bits & (2**_FRACTION_BITS - 1)).float() * 2.0**-_FRACTION_BITS


@functools.cache
def _normal_table(cutoff: float) -> tuple[Tensor, Tensor]:
    """The inverse of the cut-off normal distribution at equal steps of probability, and the height of each step.

    Values are rounded to multiples of 2**-20, so that a last-digit difference between mathematical libraries is no
    difference here.
    """
    normal = NormalDist()
    low, high = normal.cdf(-cutoff), normal.cdf(cutoff)
    count = 2**_TABLE_BITS
    inside = [normal.inv_cdf(low + (high - low) * i / count) for i in range(1, count)]
    values = torch.tensor([-cutoff, *inside, cutoff], dtype=torch.float64)
    values = ((values * 2**20).round() / 2**20).float()
    return values[:-1].contiguous(), values.diff().contiguous()
