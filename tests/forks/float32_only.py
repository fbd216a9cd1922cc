"""The fork scale_free with code for float32 only, so that float64 cannot decide what is rounding."""

from torch import Tensor

from models.attention import SeqInfo
from tests.forks import scale_free
from tests.forks.scale_free import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(scale_free.Model):
    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        hidden = super().forward(x, seq)
        if hidden.dtype.itemsize > 4:
            raise TypeError("the kernel takes float32")
        return hidden
