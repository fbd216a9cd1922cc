"""Loss scaling for float16 (Micikevicius et al., "Mixed precision training", arXiv:1710.03740, section 3.2).

float16 has few exponents: small gradients underflow. The loss is multiplied by a scale before the backward pass, and gradients
are divided by it before the step. A step whose gradients overflow is skipped and the scale halved; after many good steps the
scale is doubled. All of this stays on the device. It depends on the gradient's global norm, so all ranks decide alike.
"""

import torch
from torch import Tensor

_FIRST, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """The scale and its number of good steps, as tensors for checkpoints."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((), _FIRST, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapts the scale after a step; overflow: () float32, 1 where the step was skipped."""
        torch._amp_update_scale_(self.scale, self.good_steps, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)
        self.skipped += overflow

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {"loss_scale.scale": self.scale, "loss_scale.good_steps": self.good_steps, "loss_scale.skipped": self.skipped}

    def report(self) -> dict[str, float]:
        """For the metrics; a host sync."""
        return {"loss_scale": self.scale.item(), "skipped_steps": int(self.skipped.item())}
