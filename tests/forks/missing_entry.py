"""A fork whose sharding table lacks the norm before the feed-forward layer."""

from models import llama3
from tests.tiny import FLAVORS, Config, Model, flops, initial

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


def sharding(config: Config) -> dict[str, str]:
    return {pattern: style for pattern, style in llama3.sharding(config).items() if pattern != "layers.*.ffn_norm"}
