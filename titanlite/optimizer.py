"""The optimizer, the gradient's global norm, and the optimizer's state by parameter name."""

import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config import Optimizer as Keys
from titanlite.errors import UserError
from titanlite.low_precision import Bfloat16Adam


def build_optimizer(model: nn.Module, keys: Keys) -> torch.optim.Optimizer:
    """AdamW or Adam over two groups: parameters that are decayed, and those that are not. What is bfloat16 is rounded as
    `optimizer.rounding` says.

    Raises UserError where `optimizer.decay_parameters` finds no parameter.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name for name, p in trained.items() if is_decayed(name, p, keys)}
    if keys.decay_parameters and not decayed:
        raise UserError(f"optimizer.decay_parameters = {keys.decay_parameters!r}: matches no trained parameter's name")
    groups = [
        {"params": [(name, p) for name, p in trained.items() if name in decayed], "weight_decay": keys.weight_decay},
        {"params": [(name, p) for name, p in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    numbers = {"lr": keys.lr, "betas": (keys.beta1, keys.beta2), "eps": keys.eps}
    if any(p.dtype == torch.bfloat16 for p in trained.values()):
        compensated, compiled = keys.rounding == "compensated", keys.implementation == "fused"
        return Bfloat16Adam(groups, **numbers, decoupled=keys.name == "AdamW", compensated=compensated, compiled=compiled)
    return getattr(torch.optim, keys.name)(
        groups,
        **numbers,
        fused=keys.implementation == "fused",
        foreach=keys.implementation == "foreach",
    )


def is_decayed(name: str, parameter: Tensor, keys: Keys) -> bool:
    """Whether weight decay applies to a parameter."""
    if keys.decay_parameters:
        return re.search(keys.decay_parameters, name) is not None
    return parameter.ndim >= 2


def state_bytes(parameter: Tensor, keys: Keys) -> int:
    """What the optimizer keeps of each value of a trained parameter, in bytes; its count of steps apart."""
    remainder = 2 if parameter.dtype == torch.bfloat16 and keys.rounding == "compensated" else 0
    return 2 * parameter.element_size() + remainder  # two moments, kept as the parameter is


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, scale: Tensor | None = None) -> Tensor:
    """Scales the gradients down to a global L2 norm of `max_norm` at most; returns the norm before that, () float32.

    scale: what the loss was multiplied by; the gradients are divided by it first, and so is the norm.

    Every rank sums the squares of its shards, divided by how many ranks hold the same shard, and one all-reduce over the
    whole mesh gives the norm of the whole model's gradient. Nobody waits for the number.
    """
    by_holders: dict[int, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            by_holders.setdefault(_holders(p.grad), []).append(local)
    total = torch.stack([_sum_of_squares(local) / n for n, local in by_holders.items()]).sum()
    dist.all_reduce(total)
    norm = total.sqrt() if scale is None else total.sqrt() / scale
    # inf / norm is inf and clamps to 1; a norm that is not finite makes every gradient NaN, which the loop reports
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in by_holders.values():
        torch._foreach_mul_(local, factor if scale is None else factor / scale)
    return norm


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Row by row, then over rows. A whole matrix in one float32 sum, as in `_foreach_norm`, is off by 6e-4 on a CPU."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).flatten() for tensor in tensors]
    return torch.cat(rows).square().sum()


def _holders(tensor: Tensor) -> int:
    """How many ranks hold the same values as this one."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    holders = dist.get_world_size() // tensor.device_mesh.size()
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        holders *= size if placement.is_replicate() else 1
    return holders


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the moments of every trained parameter, zero, as a first step would; one that never gets a gradient has them too.

    So every checkpoint of a run holds the same tensors, and a new process can read them.
    """
    if isinstance(optimizer, Bfloat16Adam):
        return  # it has made them already
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    set_lr(optimizer, 0.0)  # with rate 0 neither update nor decay changes a weight
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors by name, such as "layers.0.ffn.w1.weight.exp_avg", for checkpoints."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
