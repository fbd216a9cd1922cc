"""Loss scaling for float16 (Micikevicius et al., "Mixed precision training", arXiv:1710.03740, section 3.2).

float16 has few exponents: small gradients vanish. The loss is multiplied by a scale before the backward pass, gradients are
divided by it before the step. A step whose gradients overflow is skipped and the scale halved; after many good steps it is
doubled. All of that stays on the device, and since it hangs on the gradient's global norm, all ranks decide alike.
"""

import torch
from torch import Tensor

_FIRST, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """The scale and how many good steps it has seen, as tensors that checkpoints keep."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((), _FIRST, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapts the scale after a step; overflow: () float32, 1 where the step was skipped."""
        torch._amp_update_scale_(self.scale, self.good_steps, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)
        self.skipped += overflow

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"loss_scale.scale": self.scale, "loss_scale.good_steps": self.good_steps, "loss_scale.skipped": self.skipped}

    def report(self) -> dict[str, float]:
        """For the metrics; waits for the device."""
        return {"loss_scale": self.scale.item(), "skipped_steps": int(self.skipped.item())}
