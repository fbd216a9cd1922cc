"""The FLOPs of a token in published mixtures, for MFU: by closed form from the numbers of each model's config.json.

A matrix of n numbers takes 6 n: multiply and add, forward, and backward for its input and for itself.
"""

from typing import NamedTuple

import pytest

from models import deepseek_v3, gpt_oss, mixtral

SEQ = 4096


class Hand(NamedTuple):
    """What a token is multiplied by."""

    attention: int  # numbers of the matrices of a layer's attention
    router: int
    experts: int  # numbers of the matrices of those experts of a layer that a token uses, with shared ones
    mixtures: int  # layers that have experts
    dense: int  # numbers of the feed-forward matrices of all other layers
    head: int
    pair: int  # of all heads, the widths of a query and of a value: products with one visible token
    windows: tuple[int, ...]  # how many tokens each layer sees at most


_ALL = SEQ
MODELS = {
    "mixtral 8x7b": (
        mixtral.FLAVORS["8x7b"],
        mixtral,
        Hand(
            attention=4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096,
            router=4096 * 8,
            experts=2 * 3 * 4096 * 14336,
            mixtures=32,
            dense=0,
            head=4096 * 32000,
            pair=32 * (128 + 128),
            windows=(_ALL,) * 32,
        ),
    ),
    "gpt_oss 20b": (  # biases are added, not multiplied
        gpt_oss.FLAVORS["20b"],
        gpt_oss,
        Hand(
            attention=2 * 2880 * 4096 + 2 * 2880 * 512,
            router=2880 * 32,
            experts=4 * 3 * 2880 * 2880,
            mixtures=24,
            dense=0,
            head=2880 * 201088,
            pair=64 * (64 + 64),
            windows=(128, _ALL) * 12,
        ),
    ),
    "deepseek_v3 671b": (  # the latent attention's matrices as they are trained: down, up for 128 heads, out
        deepseek_v3.FLAVORS["671b"],
        deepseek_v3,
        Hand(
            attention=7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168,
            router=7168 * 256,
            experts=(8 + 1) * 3 * 7168 * 2048,
            mixtures=58,
            dense=3 * 3 * 7168 * 18432,
            head=7168 * 129280,
            pair=128 * (192 + 128),
            windows=(_ALL,) * 61,
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_token_are_those_of_its_own_experts(name):
    config, family, hand = MODELS[name]
    layers = len(hand.windows) * hand.attention + hand.mixtures * (hand.router + hand.experts) + hand.dense
    matrices = 6 * (layers + hand.head)
    found = family.flops(config, SEQ)
    assert found.palm == matrices + 6 * hand.pair * SEQ * len(hand.windows)
    seen = sum(min(place, window) for window in hand.windows for place in range(1, SEQ + 1)) / SEQ
    assert found.causal == pytest.approx(matrices + 6 * hand.pair * seen, rel=1e-12)
