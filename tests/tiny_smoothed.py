"""The tiny Llama with label smoothing (Szegedy et al., arXiv:1512.00567, section 7) as the loss, in chunks of 100 tokens."""

from models import llama3
from models.head import Sizes
from tests.own.parts import smoothed
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.head.sizes = Sizes(400 * config.vocab_size, 2**21)
        self.head.loss = smoothed
