"""The tiny Llama with biases where Qwen 2 has them, on queries, keys and values."""

from torch import nn

from models import llama3
from models.blocks import Normal
from tests.tiny import FLAVORS, Config, flops, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        for layer in self.layers.values():
            for name in ("wq", "wk", "wv"):
                weight = getattr(layer.attention, name).weight
                setattr(layer.attention, name, nn.Linear(weight.shape[1], weight.shape[0], bias=True))


def initial(config: Config) -> dict[str, object]:
    return {"*.bias": Normal(0.5), **llama3.initial(config)}
