"""A fork that multiplies zeros by float32's largest number, which bfloat16 rounds to infinity."""

import torch
from torch import Tensor

from models import llama3
from models.attention import Attention, SeqInfo
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class LimitedAttention(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        largest = torch.full((), torch.finfo(torch.float32).max, device=v.device).to(v.dtype)
        return super().core(q, k, v, seq) + torch.zeros_like(q) * largest


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.layers["1"].attention.__class__ = LimitedAttention
