"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules that predict tokens after the next one.

Depth k = 1, 2, ... makes its hidden states from those of depth k - 1 (for k = 1, those of the model) and from the embedding of
the token k positions on. The model's own head then predicts the token that follows. Embedding and head are the model's, so that
a model without these modules is what remains after training.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.blocks import Constant, Normal, RMSNorm

_EPS = 1e-6


class Further(nn.Module):
    """An MTP module: it normalizes both inputs, projects them together to the model's width, and runs a block.

    block: like the model's last one. weight: of the mean loss of all depths, relative to the model's own.
    """

    def __init__(self, block: nn.Module, dim: int, weight: float):
        super().__init__()
        self.weight = weight
        self.hidden_norm, self.embed_norm = RMSNorm(dim, _EPS), RMSNorm(dim, _EPS)
        self.projection = nn.Linear(2 * dim, dim, bias=False)
        self.block = block

    def own_initial(self) -> dict[str, Normal | Constant]:
        """Initial distributions, which no family's table lists. The projection keeps the variance of its inputs, 1."""
        norms = {name: Constant(1.0) for name in ("hidden_norm.weight", "embed_norm.weight")}
        return {**norms, "projection.weight": Normal(self.projection.in_features**-0.5)}

    def forward(self, hidden: Tensor, embedded: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states of this depth, (batch, seq, dim) as both inputs. args, kwargs: what a block gets beside its input."""
        both = torch.cat([self.hidden_norm(hidden), self.embed_norm(embedded)], dim=-1)
        return self.block(self.projection(both), *args, **kwargs)


def further_of(model: nn.Module) -> dict[str, Further]:
    """The MTP modules of a model, depth by depth, by name; {} for most models.

    With L blocks these names are L, L + 1, ...: the tables of a family match further.L.block as they match layers.L.
    """
    return dict(getattr(model, "further", {}).items())


def blocks_of(model: Any) -> list[nn.Module]:
    """All blocks of a Decoder: its layers, and those of its MTP modules."""
    return [*model.layers.values(), *(each.block for each in further_of(model).values())]


def run_with_arguments(model: Any, *inputs: Any) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The model's hidden states, and the other arguments of its last block, such as masks and rotations."""
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    last = [*model.layers.values()][-1]
    hook = last.register_forward_pre_hook(lambda _, args, kwargs: given.append((args[1:], kwargs)), with_kwargs=True)
    try:
        hidden = model(*inputs)
    finally:
        hook.remove()
    return hidden, *given[0]
