"""The hybrid whose linear attention uses keys and values of the next token."""

from torch import Tensor

from tests.forks import hybrid
from tests.forks.hybrid import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class LinearAttention(hybrid.LinearAttention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return super().mix(q, k.roll(-1, 1), v.roll(-1, 1), documents)


class Model(hybrid.Model):
    linear = LinearAttention
