"""Linear layers that multiply in float8, by torchao (docs/float8.md).

Weights, optimizer and checkpoints stay what they are: each product scales its two operands so that their largest values come
near the largest that float8 holds, casts them, multiplies, and scales back (Micikevicius et al., arXiv:2209.05433).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.transforms.registry import every_layer

MULTIPLE = 16  # of every dimension of a float8 product


def linear_layers(model: nn.Module, config: Config) -> dict[str, nn.Linear]:
    """The linear layers of the blocks that are to multiply in float8, by name.

    The head is none of them: its logits decide the loss by small differences. Raises UserError for a pattern of
    `float8.filter_fqns` that matches nothing, and for layers of sizes that float8 products do not take.
    """
    # what only derives from nn.Linear has mathematics of its own
    every = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and name.startswith("layers.")}
    patterns = config.float8.filter_fqns
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in every)]
    chosen = {name: each for name, each in every.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    odd = {
        every_layer(name): f"{each.in_features} x {each.out_features}"
        for name, each in chosen.items()
        if each.in_features % MULTIPLE or each.out_features % MULTIPLE
    }
    faults = [f'float8.filter_fqns: "{pattern}" matches no linear layer of a block' for pattern in idle]
    faults += [
        f'float8: {name} is {size}, and float8 multiplies multiples of {MULTIPLE}; add "{name}" to float8.filter_fqns'
        for name, size in odd.items()
    ]
    if not chosen:
        faults.append("float8.filter_fqns: leaves no linear layer to multiply in float8")
    if faults:
        raise UserError("\n".join(faults))
    return chosen


def convert(model: nn.Module, config: Config) -> None:
    """Turns these layers of a model on the meta device into torchao's, whose parameters have the same names."""
    if not config.float8.enable:
        return
    layers = linear_layers(model, config)
    with _quiet():
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    keys = config.float8
    recipe = Float8LinearConfig.from_recipe_name(keys.recipe_name)
    # Powers of two: a value is rounded alike whatever else is in its tensor, so that no mesh and no microbatch changes it.
    recipe = replace(
        recipe,
        emulate=keys.emulate,
        enable_fsdp_float8_all_gather=keys.enable_fsdp_float8_all_gather,
        round_scales_to_power_of_2=True,
    )
    for name, each in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Float8Linear.from_float(each, recipe))

    model.gathers_float8 = keys.enable_fsdp_float8_all_gather


def measure_weights(model: nn.Module) -> None:
    """After an optimizer step: the scales of all weights that are gathered in float8, in one all-reduce, not one each."""
    if getattr(model, "gathers_float8", False):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao tells at its import which of its libraries this machine has no use for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
