"""Parts of one's own, as a user writes them from docs/guides/own_parts.md alone."""

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv:2302.06675: the sign of a mean of gradients."""

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.betas = betas

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                direction = torch.lerp(p.grad, state["mean"], self.betas[0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["mean"].lerp_(p.grad, 1 - self.betas[1])


def inverse_sqrt(step: int, start: int, end: int, power: float = 0.5) -> float:
    """The share of the rate that is left: 1.0 where the decay starts."""
    return (max(1, start) / step) ** power


def smoothed(logits, labels, share: float = 0.1):
    """Cross entropy, of which a share is that of all tokens alike. logits (tokens, vocab) float32; labels (tokens,)."""
    log_probabilities = logits.log_softmax(dim=-1)
    wanted = log_probabilities.gather(1, labels[:, None])[:, 0]
    return -(1 - share) * wanted - share * log_probabilities.mean(dim=-1)
