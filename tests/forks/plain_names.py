"""A fork and an optimizer whose attributes have the names that come to mind first; titanlite's own have a prefix.

Its blocks share one attention, which the model names before them (as Zamba does, arXiv:2405.16712).
"""

import torch

from models.blocks import Normal
from tests import tiny_moe
from tests.tiny_moe import FLAVORS, Config, flops

__all__ = ["FLAVORS", "LIMITS", "Config", "Model", "Named", "flops", "initial", "sharding"]

LIMITS = {"stages": False}


class Model(tiny_moe.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        layers = self.layers
        del self.layers
        self.shared = layers["0"].attention
        self.layers = layers
        for layer in layers.values():
            layer.attention = self.shared
        self.routers = torch.nn.ModuleList(layer.ffn.router for layer in layers.values())
        self.router_ranks, self.gradient_sync, self.gathers_float8 = 2, "each step", True


def initial(config: Config) -> dict[str, object]:
    return {"shared.w?.weight": Normal(0.2), **tiny_moe.initial(config)}


def sharding(config: Config) -> dict[str, str]:
    table = tiny_moe.sharding(config)
    return {pattern.replace("layers.*.attention.", "shared."): style for pattern, style in table.items()}


class Named(torch.optim.SGD):
    def __init__(self, params, lr: float, weight_decay: float = 0.0):
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=weight_decay)
        self.ema, self.own_build = 0.9, None
        for group in self.param_groups:
            group.setdefault("lr_factor", 0.5)

    def step(self, closure=None):
        super().step()
        assert {(self.ema, self.own_build, group["lr_factor"]) for group in self.param_groups} == {(0.9, None, 0.5)}
