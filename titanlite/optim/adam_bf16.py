"""Adam and AdamW for a model whose parameters, gradients and moments are all bfloat16 (`training.dtype`).

The arithmetic is float32: an update reads a parameter, its gradient and its moments, and rounds its results (rounding.py).
Moments are always rounded stochastically. Rounded to nearest, the second moment would stop short of its mean: with beta2 =
0.999 it moves by at most a thousandth of the difference, which bfloat16 loses unless the squared gradient is several times the
mean.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Optimizer
from titanlite.optim import rounding
from titanlite.optim.rounding import Compiler, Positions
from titanlite.transforms.shards import key_of, local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
REMAINDER = "remainder"  # the state for `optimizer.rounding = "compensated"`


class OptimizerGroup:
    """A parameter group with its state, and the parts of a step that are computed for the whole group at once.

    group: of torch.optim, with names. kept: names of each parameter's state tensors, which have its dtype and placement.
    compensated: also keep the bits of each bfloat16 parameter that it lacks of float32.
    """

    def __init__(self, group: dict[str, Any], state: dict[Tensor, Any], kept: tuple[str, ...], compensated: bool):
        self.group, self.parameters = group, group["params"]
        device = local_part(self.parameters[0]).device
        self.keys = torch.tensor([key_of(name) for name in group["param_names"]], device=device)
        self.counts = torch.zeros(len(self.parameters), device=device)
        self.longest = torch.tensor([max(p.shape[-2:]) for p in self.parameters], dtype=torch.float64, device=device)
        self.positions = [rounding.positions(p) for p in self.parameters]
        self._reached: tuple[list[bool], Tensor] | None = None
        for p, count in zip(self.parameters, self.counts.unbind(), strict=True):
            state[p] = {"step": count, **{name: torch.zeros_like(p, requires_grad=False) for name in kept}}
            if compensated and p.dtype == torch.bfloat16:
                state[p][REMAINDER] = torch.zeros_like(p, dtype=torch.int16, requires_grad=False)

    def count(self, skip: Tensor) -> list[int]:
        """Counts a step for every parameter with a gradient, unless it is skipped; returns the indices of these parameters."""
        having = [p.grad is not None for p in self.parameters]
        if self._reached is None or self._reached[0] != having:  # making a tensor from numbers is a host sync
            self._reached = having, torch.tensor(having, dtype=torch.float32, device=self.counts.device)
        self.counts += torch.where(skip, 0.0, self._reached[1])
        return [number for number, has in enumerate(having) if has]


def signals(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Tensor, Tensor]:
    """Whether a step is skipped, () bool, and the divisor of gradients, () float32: `found_inf` and `grad_scale`, which
    the loop sets as for torch's fused optimizers, without a host sync."""
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    skip = torch.zeros((), dtype=torch.bool, device=device) if found_inf is None else found_inf > 0
    return skip, torch.ones((), device=device) if scale is None else scale.float()


@torch.no_grad()
def clear_remainders_of_zeros(optimizer: torch.optim.Optimizer) -> None:
    """Call it after other code has changed parameters. The negative remainder of an earlier value makes a 0 NaN, which
    `rounding.split` stores as 0 again, at each step. In a kernel this check takes 20 of its registers."""
    for p, state in optimizer.state.items():
        if REMAINDER in state:
            local_part(state[REMAINDER]).masked_fill_(local_part(p) == 0, 0)


class Bfloat16Adam(torch.optim.Optimizer):
    """torch.optim's Adam or AdamW, in bfloat16. Takes `found_inf` and `grad_scale`, as torch's fused ones do.

    groups: as of torch.optim, with pairs (name, parameter). With a `compiler` there is one kernel for each parameter;
    otherwise one for each operation, a few rows at a time. Both give the same values on a CPU.
    """

    def __init__(self, groups: list[dict[str, Any]], cfg: Optimizer, compiler: Compiler | None):
        super().__init__(groups, {"lr": cfg.lr, "fused": True})  # "fused": it takes found_inf
        self._betas, self._eps, self._decoupled = (cfg.beta1, cfg.beta2), cfg.eps, cfg.name != "Adam"
        self._update = rounding.elementwise(self._of_matrix, compiler)
        self._parts = [OptimizerGroup(group, self.state, MOMENTS, cfg.rounding == "compensated") for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        skip, scale = signals(self, self._parts[0].counts.device)
        with rounding.any_shape():
            for part in self._parts:
                self._step(part, skip, scale)

    def _step(self, part: OptimizerGroup, skip: Tensor, scale: Tensor) -> None:
        reached = part.count(skip)
        lr, decay = part.group["lr"], part.group["weight_decay"]
        counts = part.counts.double()
        decays = torch.full_like(counts, lr * decay if self._decoupled else decay)
        corrections = (1 - self._betas[1] ** counts).rsqrt()
        numbers = torch.stack([lr / (1 - self._betas[0] ** counts), decays, corrections, counts], dim=1)
        rows, keys = rounding.each_row(numbers.float()), rounding.each_row(rounding.keys_of(part.keys, part.counts))
        for index in reached:
            p = part.parameters[index]
            state = self.state[p]
            kept = [state[name] for name in (*MOMENTS, REMAINDER) if name in state]
            tensors = [rounding.flat(tensor) for tensor in (p, p.grad, *kept)]
            self._update(tensors, part.positions[index], keys[index], rows[index], skip, scale)

    def _of_matrix(
        self, tensors: list[Tensor], position: Positions, key: Tensor, numbers: Tensor, skip: Tensor, scale: Tensor
    ) -> None:
        """One step of one parameter. numbers: (4,) float32: the rate over its bias correction, the decay, the second moment's
        correction, and the count, which is not used."""
        (p, grad, exp_avg, exp_avg_sq), remainder = tensors[:4], tensors[4] if len(tensors) > 4 else None
        beta1, beta2 = self._betas
        value, g = rounding.joined(p, remainder), grad.float() / scale
        if self._decoupled:
            value = value - value * numbers[1]
        else:
            g = g + value * numbers[1]
        first = exp_avg.float() * beta1 + g * (1 - beta1)
        second = exp_avg_sq.float() * beta2 + g * g * (1 - beta2)
        value = value - numbers[0] * first / (rounding.root(second) * numbers[2] + self._eps)
        bits = rounding.random_bits(position, key, 0)
        exp_avg.copy_(torch.where(skip, exp_avg, rounding.stochastic(first, bits)))
        exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, rounding.stochastic(second, bits >> 16)))
        rounding.store(p, remainder, value, position, key, 1, skip)
