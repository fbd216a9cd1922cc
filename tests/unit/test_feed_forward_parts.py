"""Feed-forward layers that compute the sequence in parts: how many parts there are, and which layers can."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.blocks import SwiGLU
from titanlite.transforms.activation_checkpoint import chunk_feed_forward, unchunkable

DIM, HIDDEN = 8, 12


def model_of(*layers: nn.Module) -> Any:
    """The attributes of a model that `chunk_feed_forward` reads."""
    return SimpleNamespace(layers=nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)}))


def layer_of(kind: type[SwiGLU] = SwiGLU) -> SwiGLU:
    torch.manual_seed(0)
    return kind(DIM, HIDDEN)


class Noted(SwiGLU):
    """Records how many tokens each call computes."""

    def forward(self, x: Tensor) -> Tensor:
        self.lengths = [*getattr(self, "lengths", []), x.shape[-2]]
        return super().forward(x)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((2, 12), [4, 4, 4]), ((12,), [4, 4, 4]), ((2, 4), [2, 1, 1]), ((2, 3), [1, 1, 1]), ((2, 1), [1])],
)
def test_there_are_as_many_parts_as_configured_unless_there_are_fewer_tokens(shape, lengths):
    """Of a sequence, or of the tokens of all rows."""
    layer = layer_of(Noted)
    chunk_feed_forward(model_of(layer), 3)
    with torch.no_grad():
        assert layer(torch.randn(*shape, DIM)).shape == (*shape, DIM)
    assert layer.lengths == lengths


class Gained(SwiGLU):
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * gain)


def test_layers_that_cannot_compute_in_parts_are_named():
    assert unchunkable(model_of(layer_of(), nn.Linear(DIM, DIM))) == ""
    assert unchunkable(model_of(layer_of(Noted))) == ""
    assert "no SwiGLU of models/blocks.py" in unchunkable(model_of(nn.Linear(DIM, DIM)))
    assert "forward of Gained takes more than x" in unchunkable(model_of(layer_of(), layer_of(Gained)))
