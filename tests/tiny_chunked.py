"""The tiny Llama whose logits are made in chunks of 100 tokens."""

from models import llama3
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.head.logits_per_chunk = 100 * config.vocab_size
