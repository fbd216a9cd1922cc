"""Loss scaling for float16 (Micikevicius et al., "Mixed precision training", arXiv:1710.03740, section 3.2).

float16 has few exponents: small gradients underflow. The backward pass begins with the summed loss times a scale: divided by
the number of labels, it would begin with smaller gradients the larger the batch. The optimizer divides gradients by scale and
labels. A step whose gradients overflow is skipped and the scale halved; after many good steps the scale is doubled.
All of this stays on the device. It depends on the gradient's global norm, so all ranks decide alike.
"""

import torch
from torch import Tensor

from titanlite.ground.torch_private import amp_update_scale_

# The gradient of a logit is at most 1, that of a weight is a sum over the tokens of a microbatch, float16 ends at 65,504: with
# 2,048 tokens a microbatch, the debug recipe's first steps overflow with 2**9. Each halving costs a step.
FIRST = 2.0**8
# With a smaller scale a gradient of 1 is below float16's smallest normal number, and all gradients lose digits.
LEAST = torch.finfo(torch.float16).smallest_normal
_GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """The scale and its number of good steps, as tensors for checkpoints.

    divisor: of this step's gradients, scale x labels; `forward_backward` sets it.
    """

    def __init__(self, device: torch.device):
        self.scale = torch.full((), FIRST, device=device)
        self.divisor = self.scale
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapts the scale after a step; overflow: () float32, 1 where the step was skipped."""
        amp_update_scale_(self.scale, self.good_steps, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)
        self.skipped += overflow

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {"loss_scale.scale": self.scale, "loss_scale.good_steps": self.good_steps, "loss_scale.skipped": self.skipped}

    def report(self) -> dict[str, float]:
        """For the metrics; a host sync."""
        return {"loss_scale": self.scale.item(), "skipped_steps": int(self.skipped.item())}
