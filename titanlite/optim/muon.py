"""Muon: orthogonalized momentum, so that an update changes all directions of a matrix equally.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), for the orthogonalization; Liu et al., "Muon is
scalable for LLM training", arXiv:2502.16982, for the scale of an update, 0.2 sqrt(max(rows, columns)), which makes it as large
as an update of AdamW: learning rate and weight decay carry over. AdamW updates everything but the blocks' matrices. A stack of
experts is as many matrices.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import Optimizer
from titanlite.optim import rounding
from titanlite.optim.adam_bf16 import REMAINDER, OptimizerGroup, signals
from titanlite.optim.rounding import Compiler, Positions
from titanlite.optim.whole_matrices import Bucket, Redistribution
from titanlite.transforms.shards import local_part

MOMENTUM = "momentum_buffer"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: bring singular values above 0.01 close to 1 in five steps
_AS_LARGE_AS_ADAMW = 0.2  # root mean square of an update, arXiv:2502.16982, section 2.2


class Muon(torch.optim.Optimizer):
    """Muon for `groups`, combined with an optimizer for the rest: one set of parameters, state and steps.

    groups: as of torch.optim, with pairs (name, parameter), the parameters matrices or stacks of experts. precision: of the
    orthogonalization, and of its communication. bfloat16 parameters are rounded as in `Bfloat16Adam`. Takes `found_inf` and
    `grad_scale` if the optimizer of the rest does, or has nothing to update. compiler: as for `Bfloat16Adam`. All ranks of
    `group` construct it together.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rest: torch.optim.Optimizer,
        cfg: Optimizer,
        precision: torch.dtype,
        compiler: Compiler | None,
        group: dist.ProcessGroup | None = None,
    ):
        self._with_rest = any(group["params"] for group in rest.param_groups)
        super().__init__(groups, {"lr": cfg.lr, "fused": rest.defaults["fused"] or not self._with_rest})
        self._momentum, self._nesterov, self._ns_steps = cfg.momentum, cfg.nesterov, cfg.ns_steps
        self._precision = precision
        self._gather = rounding.elementwise(self._momentum_of, compiler)
        self._update = rounding.elementwise(self._updated, compiler)
        self._parts = [
            OptimizerGroup(group, self.state, (MOMENTUM,), cfg.rounding == "compensated") for group in self.param_groups
        ]
        self._redistribution = Redistribution([p for part in self._parts for p in part.parameters], group)
        self.rest = rest
        self.state.update(rest.state)
        rest.state = self.state
        self.param_groups += rest.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        if self._with_rest:
            for name in ("found_inf", "grad_scale"):
                setattr(self.rest, name, getattr(self, name, None))
            self.rest.step()
        skip, scale = signals(self, self._parts[0].counts.device)
        parameters: list[Tensor] = []
        positions, used, keys, numbers = [], [], [], []
        for part in self._parts:
            used += [len(parameters) + number for number in part.count(skip)]
            parameters += part.parameters
            positions += part.positions
            keys += rounding.each_row(rounding.keys_of(part.keys, part.counts))
            numbers += rounding.each_row(self._numbers(part))
        with rounding.any_shape():
            for one in self._redistribution.buckets(used):
                work = [(parameters[n], positions[n], keys[n], numbers[n]) for n in one.parameters]
                self._step_bucket(one, work, skip, scale)

    def _numbers(self, part: OptimizerGroup) -> Tensor:
        """The rate and decay of each parameter in this step, (n, 4) float32; the last two columns are padding."""
        lr, decay = part.group["lr"], part.group["weight_decay"]
        rates = part.longest.sqrt() * _AS_LARGE_AS_ADAMW * lr
        return torch.stack([rates, torch.full_like(rates, lr * decay), rates, rates], dim=1).float()

    def _step_bucket(
        self, one: Bucket, work: list[tuple[Tensor, Positions, Tensor, Tensor]], skip: Tensor, scale: Tensor
    ) -> None:
        pending = []
        for p, position, key, _ in work:
            assert p.grad is not None
            pending.append(torch.empty_like(local_part(p), dtype=self._precision))
            tensors = [rounding.flat(each) for each in (p.grad, self.state[p][MOMENTUM], pending[-1])]
            self._gather(tensors, position, key, skip, scale)
        directions = self._redistribution.map(one, pending, lambda wholes: orthogonalized(wholes, self._ns_steps))
        for (p, position, key, numbers), direction in zip(work, directions, strict=True):
            tensors = [rounding.flat(p), rounding.flat(direction)]
            tensors += [rounding.flat(self.state[p][REMAINDER])] if REMAINDER in self.state[p] else []
            self._update(tensors, position, key, numbers, skip)

    def _momentum_of(self, tensors: list[Tensor], position: Positions, key: Tensor, skip: Tensor, scale: Tensor) -> None:
        """Adds a gradient to the momentum, and writes the matrix to orthogonalize."""
        grad, kept, pending = tensors
        g = grad.float() / scale
        mean = kept.float() * self._momentum + g * (1 - self._momentum)
        pending.copy_(g * (1 - self._momentum) + mean * self._momentum if self._nesterov else mean)
        rounding.store(kept, None, mean, position, key, 0, skip)

    def _updated(self, tensors: list[Tensor], position: Positions, key: Tensor, numbers: Tensor, skip: Tensor) -> None:
        """Decays a parameter and moves it against its direction."""
        (p, direction), remainder = tensors[:2], tensors[2] if len(tensors) > 2 else None
        value = rounding.joined(p, remainder)
        value = value - value * numbers[1] - direction.float() * numbers[0]
        rounding.store(p, remainder, value, position, key, 1, skip)


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Approximately U V^T of each matrix U S V^T, (matrices, rows, columns), in their dtype, with singular values between 0.7
    and 1.2: Newton-Schulz iterations of a polynomial that has no fixed point at 1 but grows fast from 0."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = wide / norms.clamp(min=1e-7).to(wide.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x
