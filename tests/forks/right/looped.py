"""Every block is applied twice in a row (immediate block-wise weight sharing, arXiv:2402.14905, section 2.3)."""

from torch import Tensor

from models import llama3
from models.attention import SeqInfo, with_mask
from models.blocks import Flops
from models.llama3 import initial, sharding
from models.rope import rotation
from tests.tiny import FLAVORS, Config

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


class Model(llama3.Model):
    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        c = self.config
        x, seq = self.embed(x), with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x = layer(layer(x, rope=rope, seq=seq), rope=rope, seq=seq)
        return x


def flops(config: Config, seq_len: int) -> Flops:
    of_head = 6 * config.dim * config.vocab_size
    return Flops(*(2 * (count - of_head) + of_head for count in llama3.flops(config, seq_len)))
