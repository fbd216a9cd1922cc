"""The tiny Llama, whose head is always the embedding: `tie_weights` of its own, and no key in Config that says so."""

from models import llama3
from models.blocks import Distribution, Normal
from models.llama3 import Config, flops, sharding
from tests.tiny import FLAVORS, HF, HF_TYPES, from_hf, to_hf

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]


class Model(llama3.Model):
    def tie_weights(self) -> None:
        if self.embed is not None and self.head is not None:
            self.head.output.weight = self.embed.weight


def initial(config: Config) -> dict[str, Distribution]:
    return {**llama3.initial(config), "embed.weight": Normal(0.02)}
