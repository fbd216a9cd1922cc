"""A fork with learned positions, looked up once for all sequences: a rank gets positions that are not those of its tokens."""

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo, with_mask
from models.rope import rotation
from tests.tiny import FLAVORS, Config, flops, initial
from tests.tiny import sharding as of_tiny

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.positions = nn.Embedding(64, config.dim)

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        c = self.config
        one_row = torch.arange(x.shape[1], device=x.device)[None]  # correct: seq.positions, (batch, seq)
        x, seq = self.embed(x) + self.positions(one_row), with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x = layer(x, rope, seq)
        return x


def sharding(config: Config) -> dict[str, str]:
    return {**of_tiny(config), "positions": "vocab"}
