"""The job of every contestant, and what they share: the weights and the batches."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import llama3
from titanlite.registry.family import Family
from titanlite.transforms.initialize import fill, match_initial
from titanlite.transforms.parameters import every_layer

CONFIG = "config.json"


class Unfit(Exception):
    """A contestant does not support a job; the message says why. It is left out, which is not a failure."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of one contestant."""

    module: str  # its file in this folder
    folder: str  # of config.json, the dimensions in Hugging Face's format, and of what contestants write
    device: str = "cpu"  # or "cuda"
    precision: str = "bfloat16"  # float32 master weights; "float32"; "bfloat16-pure": parameters and moments too
    batch: int = 8  # sequences in one forward and backward pass
    seq: int = 256  # tokens in one sequence
    accumulate: int = 1  # passes in one optimizer step
    threads: int = 1  # of each rank
    compiled: bool = True
    recompute: str = "none"  # or "full": only the input of each block is kept for the backward pass
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of this contestant only

    @property
    def model(self) -> llama3.Config:
        """The dimensions, from config.json."""
        return llama3.from_hf(self.description())

    def description(self) -> dict[str, Any]:
        """config.json."""
        return json.loads((Path(self.folder) / CONFIG).read_text(encoding="utf-8"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters, gradients and moments."""
        return torch.bfloat16 if self.precision == "bfloat16-pure" else torch.float32

    @property
    def amp(self) -> torch.dtype | None:
        """The dtype of torch.autocast; None: no autocast."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def step_tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.accumulate * self.batch * self.seq

    def tokens(self, step: int) -> Tensor:
        """The batch of a step, (accumulate, batch, seq + 1) int64 on the CPU, the same for all and different every step.

        Token t has a probability of about 1 / (t + 1), Zipf's law, so that the model learns from the first step on: with
        uniform tokens, a contestant whose optimizer does nothing would agree with all others.
        """
        generator = torch.Generator().manual_seed(self.seed + step)
        shape = (self.accumulate, self.batch, self.seq + 1)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        size = self.model.vocab_size
        return (size**uniform).long().clamp_(max=size) - 1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """titanlite's initial weights by Hugging Face's names, one at a time, in `dtype` on the device.

        They are computed: a file for 8B would have 32 GB, which every turn would read at its start.
        """
        family = Family(llama3, self.model)
        model = family.on_meta()
        distributions, faults = match_initial(model, family)
        assert not faults, faults
        for name, parameter in model.named_parameters():
            tensor = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
            fill(tensor, name, distributions[name], self.seed)
            theirs = llama3.HF[every_layer(name).replace("*", "{i}")]
            yield theirs.replace("{i}", name.split(".")[1]), tensor

    def decay_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """AdamW's groups: matrices are decayed, norms are not."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]

    def adamw(self) -> dict[str, Any]:
        """AdamW's other arguments."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps, "fused": True}


@torch.no_grad()
def load(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copies every tensor into the parameter of that name; each parameter must get one."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        parameters.pop(name).copy_(tensor)
    assert not parameters, f"without initial weights: {list(parameters)}"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection for models that rotate dimensions 2i and 2i + 1 instead of i and i + head_dim / 2."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
