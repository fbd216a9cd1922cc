"""All blocks have one attention, as some layers of hybrid models share theirs (arXiv:2405.16712).

A stage of a pipeline would have to train it with others.
"""

from models import llama3
from models.llama3 import flops, initial, sharding
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "LIMITS", "Config", "Model", "flops", "initial", "sharding"]

LIMITS = {"stages": False}


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        first = self.layers["0"]
        for layer in self.layers.values():
            layer.attention = first.attention
