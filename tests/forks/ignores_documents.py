"""The hybrid whose linear attention crosses the boundaries of documents."""

from torch import Tensor

from tests.forks import hybrid
from tests.forks.hybrid import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class LinearAttention(hybrid.LinearAttention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return super().mix(q, k, v, None)


class Model(hybrid.Model):
    linear = LinearAttention
