"""Bidirectional attention, for a model that does not generate: declared with LIMITS."""

import torch
from torch import Tensor

from models import llama3
from models.attention import Attention, SeqInfo
from models.blocks import Flops
from tests.tiny import FLAVORS, Config, initial, sharding

__all__ = ["FLAVORS", "LIMITS", "Config", "Model", "flops", "initial", "sharding"]

LIMITS = {"causal": False}


class BothWays(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        """All tokens of a document attend to each other. q, k, v: (batch, seq, heads, head_dim)."""
        k, v = (part.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        if seq.documents is not None:
            others = seq.documents[:, None, :, None] != seq.documents[:, None, None, :]
            scores = scores.masked_fill(others, -torch.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.attention.__class__ = BothWays


def flops(config: Config, seq_len: int) -> Flops:
    every = llama3.flops(config, seq_len).palm
    return Flops(every, every)
