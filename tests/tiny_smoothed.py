"""The tiny Llama with label smoothing (Szegedy et al., arXiv:1512.00567, section 7) as the loss, in chunks of 100 tokens."""

from torch import Tensor

from models import llama3
from models.head import Sizes
from tests.tiny import FLAVORS, Config, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    log_probabilities = logits.log_softmax(dim=-1)
    return -0.9 * log_probabilities.gather(1, labels[:, None])[:, 0] - 0.1 * log_probabilities.mean(dim=-1)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        self.head.sizes = Sizes(400 * config.vocab_size, 2**21)
        self.head.loss = smoothed
