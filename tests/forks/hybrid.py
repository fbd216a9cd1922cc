"""A right fork: the tiny Llama with linear attention in every second layer, which refuses generation. Other forks break it."""

import torch
from torch import Tensor

from models import llama3
from models.attention import Attention, SeqInfo, dense_mask
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "LinearAttention", "Model", "flops", "initial", "sharding"]


class LinearAttention(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        if seq.cache is not None:
            raise NotImplementedError("linear attention has no cache")
        return self.mix(q, k, v, seq.documents)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Sums of values, weighted by dot products without softmax. q, k, v: (batch, seq, heads, head_dim)."""
        k, v = (part.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for part in (k, v))
        documents = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device) if documents is None else documents
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * dense_mask(documents)
        return torch.einsum("bhqk,bkhd->bqhd", scores.to(v.dtype), v)


class Model(llama3.Model):
    linear: type[Attention] = LinearAttention

    def __init__(self, config: Config):
        super().__init__(config)
        for index, layer in self.layers.items():
            if int(index) % 2:
                layer.attention.__class__ = self.linear
