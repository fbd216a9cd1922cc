"""The tiny Llama whose logits are computed in chunks of at most 100 tokens."""

from models import llama3
from models.head import Sizes
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.head.sizes = Sizes(100 * config.vocab_size, 2**21)
