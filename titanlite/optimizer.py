"""The optimizer, the gradient's global norm, and the optimizer's state by parameter name."""

import re

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config import Optimizer as Keys
from titanlite.errors import UserError


def build_optimizer(model: nn.Module, keys: Keys) -> torch.optim.Optimizer:
    """AdamW or Adam over two groups: parameters that are decayed, and those that are not.

    Raises UserError where `optimizer.decay_parameters` finds no parameter.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name for name, p in trained.items() if is_decayed(name, p, keys)}
    if keys.decay_parameters and not decayed:
        raise UserError(f"optimizer.decay_parameters = {keys.decay_parameters!r}: matches no trained parameter's name")
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed], "weight_decay": keys.weight_decay},
        {"params": [p for name, p in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return getattr(torch.optim, keys.name)(
        [group for group in groups if group["params"]],
        lr=keys.lr,
        betas=(keys.beta1, keys.beta2),
        eps=keys.eps,
        fused=keys.implementation == "fused",
        foreach=keys.implementation == "foreach",
    )


def is_decayed(name: str, parameter: Tensor, keys: Keys) -> bool:
    """Whether weight decay applies to a parameter."""
    if keys.decay_parameters:
        return re.search(keys.decay_parameters, name) is not None
    return parameter.ndim >= 2


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """Scales the gradients down to a global L2 norm of `max_norm` at most; returns the norm before that, () float32.

    scale: what the loss was multiplied by; the gradients are divided by it first, and so is the norm. A fused optimizer is
    told by how much to divide and does it within its step; of others the gradients are divided here.

    Every rank sums the squares of its shards, divided by how many ranks hold the same shard, and one all-reduce over the
    whole mesh gives the norm of the whole model's gradient. Nobody waits for the number.
    """
    by_holders: dict[int, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                by_holders.setdefault(_holders(p.grad), []).append(local)
    total = torch.stack([_sum_of_squares(local) / n for n, local in by_holders.items()]).sum()
    dist.all_reduce(total)
    norm = total.sqrt() if scale is None else total.sqrt() / scale
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    if scale is not None:
        divisor = divisor * scale
    if optimizer.defaults["fused"]:
        optimizer.grad_scale = divisor
    else:
        for local in by_holders.values():
            torch._foreach_div_(local, divisor)
    return norm


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Row by row, then over rows. A whole matrix in one float32 sum, as in `_foreach_norm`, is off by 6e-4 on a CPU."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    return torch.cat(rows).float().square().sum()


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
