"""A fork whose initial distributions lack one parameter."""

from models.blocks import Constant, Normal
from tests.tiny import FLAVORS, Config, Model, flops, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]


def initial(config: Config) -> dict[str, Normal | Constant]:
    named = ("embed", "layers.*.attention.w[qko]", "layers.*.ffn.w[123]", "head.output")
    return {"*norm.weight": Constant(1.0), **{f"{module}.weight": Normal(0.02) for module in named}}
