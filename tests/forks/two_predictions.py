"""A fork whose head predicts the next two tokens in training, and whose FLOPs omit the second prediction."""

import torch
from torch import Tensor, nn

from models import llama3
from models.head import IGNORE, Head
from tests.tiny import FLAVORS, Config, flops, initial
from tests.tiny import sharding as of_tiny

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class TwoPredictions(Head):
    """The loss of the second token after each one is added to that of the first (arXiv:2404.19737)."""

    def __init__(self, norm: nn.Module, dim: int, vocab_size: int):
        super().__init__(norm, dim, vocab_size)
        self.second = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(hidden)
        after = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1)
        return super().forward(hidden, labels) + super().forward(hidden + self.second(hidden), after)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.head = TwoPredictions(self.head.norm, config.dim, config.vocab_size)


def sharding(config: Config) -> dict[str, str]:
    return {**of_tiny(config), "head.second": "replicate"}
