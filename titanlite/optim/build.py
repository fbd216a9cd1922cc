"""The optimizer, the gradient's global norm, and the optimizer's state by parameter name."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Optimizer as Keys
from titanlite.errors import UserError
from titanlite.optim.adam_bf16 import Bfloat16Adam
from titanlite.optim.muon import Muon
from titanlite.transforms.shards import local_part


def build_optimizer(model: nn.Module, keys: Keys, compute: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """The optimizer that `keys.name` asks for, over groups of parameters that are decayed and of such that are not. What is
    bfloat16 is rounded as `optimizer.rounding` says. For Muon all ranks together.

    compute: the precision of the forward and backward passes, `training.mixed_precision_param`; Muon orthogonalises in it.

    Raises UserError where `optimizer.decay_parameters` finds no parameter, or Muon no matrix.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name for name, p in trained.items() if is_decayed(name, p, keys)}
    if keys.decay_parameters and not decayed:
        raise UserError(f"optimizer.decay_parameters = {keys.decay_parameters!r}: matches no trained parameter's name")

    def groups(names: list[str]) -> list[dict[str, Any]]:
        found = [
            {"params": [(n, trained[n]) for n in names if n in decayed], "weight_decay": keys.weight_decay},
            {"params": [(n, trained[n]) for n in names if n not in decayed], "weight_decay": 0.0},
        ]
        return [group for group in found if group["params"]]

    if keys.name != "Muon":
        return _adam(groups(list(trained)), keys)
    matrices = [name for name, p in trained.items() if is_orthogonalised(name, p, keys)]
    others = [name for name in trained if name not in set(matrices)]
    if not matrices:
        raise UserError('optimizer.name = "Muon": the model has no trained matrix in its layers; use "AdamW"')
    return Muon(
        groups(matrices),
        _adam(groups(others), keys) if others else None,
        keys.lr,
        keys.momentum,
        keys.nesterov,
        keys.ns_steps,
        precision=torch.float32 if compute == torch.float32 else torch.bfloat16,
        **_rounding([trained[name] for name in matrices], keys),
    )


def _adam(groups: list[dict[str, Any]], keys: Keys) -> torch.optim.Optimizer:
    numbers = {"lr": keys.lr, "betas": (keys.beta1, keys.beta2), "eps": keys.eps}
    parameters = [p for group in groups for _, p in group["params"]]
    if any(p.dtype == torch.bfloat16 for p in parameters):
        return Bfloat16Adam(groups, **numbers, decoupled=keys.name != "Adam", **_rounding(parameters, keys))
    return (torch.optim.Adam if keys.name == "Adam" else torch.optim.AdamW)(
        groups,
        **numbers,
        fused=keys.implementation == "fused",
        foreach=keys.implementation == "foreach",
    )


def _rounding(parameters: list[Tensor], keys: Keys) -> dict[str, bool]:
    """How our own optimizers write parameters of that dtype."""
    narrow = any(p.dtype == torch.bfloat16 for p in parameters)
    return {"compensated": narrow and keys.rounding == "compensated", "compiled": keys.implementation == "fused"}


def is_orthogonalised(name: str, parameter: Tensor, keys: Keys) -> bool:
    """Whether Muon treats a parameter as a matrix: embedding, head, norms and biases are AdamW's."""
    return keys.name == "Muon" and parameter.ndim == 2 and name.startswith("layers.")


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
                by_holders.setdefault(_holders(p.grad), []).append(local_part(p.grad))
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
