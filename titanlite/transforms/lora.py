"""Low-rank adapters (Hu et al., "LoRA: low-rank adaptation of large language models", arXiv:2106.09685): y = W x + s B A x.

The weights of a model are frozen. Each chosen linear layer gets two thin trained matrices, A with `rank` rows and B with `rank`
columns, and s = alpha / rank. B begins at zero, so the adapted model begins equal to the original. Adapters are added on the
meta device, before anything is sharded. Code that splits, initializes or saves a model finds them as parameters of the linear
layer itself, "layers.0.attention.wq.lora_a" beside "layers.0.attention.wq.weight".
"""

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.blocks import Constant, Distribution, Normal
from models.moe import Experts
from titanlite.config.read import suggest
from titanlite.config.schema import Lora
from titanlite.ground.errors import UserError
from titanlite.transforms.parameters import A, B, block_linears, every_layer, is_adapter


class LoraLinear(nn.Linear):
    """An nn.Linear to which `adapt` has added an adapter; lora_a (rank, in), lora_b (out, rank)."""

    SPLIT: ClassVar = {A: 1, B: 0}  # tensor parallelism splits an adapter along the dimension that it shares with the weight
    lora_scale: float
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def own_initial(self) -> dict[str, Distribution]:
        """The initial distributions of the adapter, which a family's table does not list.

        B zero; A normal with variance 1 / in, so that A x is as large as x is (Hayou et al., arXiv:2406.08447: this choice
        takes larger learning rates than A zero).
        """
        return {A: Normal(self.in_features**-0.5), B: Constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        # Under tensor parallelism these are DTensors, and need no collective here: split by rows ("column") both summands are
        # this rank's features; split by columns ("row") both are parts of one sum over ranks.
        return super().forward(x) + F.linear(F.linear(x, self.lora_a) * self.lora_scale, self.lora_b)


def adapt(model: nn.Module, cfg: Lora, frozen: torch.dtype) -> None:
    """Freezes a model, and adds adapters to the linear layers that `cfg.modules` matches, in place.

    frozen: the dtype of the frozen weights, the compute precision: they take no steps that need a float32 master. Adapters are
    float32.

    Raises UserError that lists the patterns which match no linear layer of the blocks, for one that covers experts or a tied
    weight, for adapters of a higher rank than their layer, and for a model with parameters of such names of its own.
    """
    if own := [every_layer(name) for name, _ in model.named_parameters() if is_adapter(name)]:
        raise UserError(f"lora.enable = true: the model has a parameter {own[0]} of its own; rename it")
    stacks = [name for name, module in model.named_modules() if isinstance(module, Experts)]
    if covering := [pattern for pattern in cfg.modules if fnmatch.filter(stacks, pattern)]:
        raise UserError(
            f'lora.enable = true: "{covering[0]}" of lora.modules covers {every_layer(stacks[0])}, the stacked weights of '
            'experts, which take no adapters; set lora.modules = ["layers.*.attention.*"]'
        )
    linears = block_linears(model)  # a head multiplies by its weight in chunks and never calls its projection
    chosen = {pattern: fnmatch.filter(linears, pattern) for pattern in cfg.modules}
    if unused := [pattern for pattern, names in chosen.items() if not names]:
        kinds = list(dict.fromkeys(every_layer(name) for name in linears))
        lines = [f'lora.modules: "{p}" matches no nn.Linear of the layers{suggest(every_layer(p), kinds)}' for p in unused]
        raise UserError("\n".join(lines))
    adapted = set().union(*chosen.values())
    least, kind = min((min(linears[name].weight.shape), every_layer(name)) for name in adapted)
    if cfg.rank > least:
        raise UserError(f"lora.rank = {cfg.rank}: higher than that of {kind}, {least}; lower it, or change lora.modules")
    owners: Counter[Tensor] = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    if tied := sorted({every_layer(name) for name in adapted if owners[linears[name].weight] > 1}):
        raise UserError(
            f"lora.enable = true: the weight of {tied[0]} is another module's too, and an export could not merge the adapter "
            "of one; leave it out of lora.modules"
        )
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(frozen)
    for name in adapted:
        module = linears[name]
        module.__class__ = LoraLinear
        assert isinstance(module, LoraLinear)
        module.lora_scale = cfg.alpha / cfg.rank
        module.lora_a = nn.Parameter(torch.empty(cfg.rank, module.in_features, device="meta"))
        module.lora_b = nn.Parameter(torch.empty(module.out_features, cfg.rank, device="meta"))


# ------------------------------------------------------------------------------------------------------------- checkpoints


def merged(
    names: Iterable[str], read: Callable[[str], Tensor], lora: dict[str, Any]
) -> tuple[list[str], Callable[[str], Tensor]]:
    """A checkpoint's tensors with adapters merged into weights: their names, and the function that reads one.

    read: returns the whole tensor of a name. lora: the [lora] section that is stored with them; where it is not enabled,
    nothing changes. A weight with an adapter is W + alpha / rank * B A in float32, for the caller to round once.
    """
    every = dict.fromkeys(names)
    if not lora.get("enable"):
        return list(every), read

    def read_merged(name: str) -> Tensor:
        weight, path = read(name), name.rpartition(".")[0]
        if not name.endswith(".weight") or f"{path}.{A}" not in every:
            return weight
        a, b = read(f"{path}.{A}").float(), read(f"{path}.{B}").float()
        return torch.addmm(weight.float(), b, a, alpha=lora["alpha"] / lora["rank"])

    return [name for name in every if not is_adapter(name)], read_merged
