"""The hybrid whose linear attention generates only from the tokens of the current forward pass."""

from torch import Tensor

from models.attention import SeqInfo
from tests.forks import hybrid
from tests.forks.hybrid import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class LinearAttention(hybrid.LinearAttention):
    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        return super().core(q, k, v, seq._replace(cache=None))


class Model(hybrid.Model):
    linear = LinearAttention
