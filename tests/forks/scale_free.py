"""A correct fork with a learned factor before the last norm, which cancels it, so that its gradient is mostly rounding."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo
from models.blocks import Constant
from tests.forks.cancelling import Weights
from tests.tiny import FLAVORS, Config, flops

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.factor = Weights(1)

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        return 1000.0 * self.factor() * super().forward(x, seq)  # so that the norm's eps adds nothing


def sharding(config: Config) -> dict[str, str]:
    return {**llama3.sharding(config), "factor": "replicate"}


def initial(config: Config) -> dict[str, object]:
    return {"factor.weight": Constant(1.0), **llama3.initial(config)}
