"""An exponential moving average (EMA) of the trained weights, in float32, sharded as they are.

Polyak & Juditsky, "Acceleration of stochastic approximation by averaging" (SIAM J. Control Optim. 30, 1992), average the
weights of all steps; the exponential mean forgets the early ones. Update t uses the decay min(d, (1 + t) / (10 + t)), as
TensorFlow's `ExponentialMovingAverage` does with `num_updates`: with a constant decay of 0.999, initial weights would still be
37% of the average after 1,000 steps.
"""

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from titanlite.checkpoint.tensors import AVERAGE_UPDATES, AVERAGES, WEIGHTS, average_of
from titanlite.transforms import float8
from titanlite.transforms.shards import local_part


class Ema:
    """The averages of all parameters of an optimizer, which begin as copies of them. Buffers are not averaged."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self._decay = decay
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.averages = {p: p.detach().to(torch.float32, copy=True) for p in self._parameters}
        self.updates = torch.zeros((), device=local_part(self._parameters[0]).device)  # () float32

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """After an optimizer step, without a host sync. skipped: () float32, 1 after a step that was skipped: nothing moves."""
        moved = 1 - skipped
        self.updates += moved
        share = (9 / (10 + self.updates)).clamp(min=1 - self._decay) * moved  # 1 - decay, which float32 would round
        for p in self._parameters:
            local_part(self.averages[p]).lerp_(local_part(p).float(), share)

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model has the averages as its weights meanwhile, rounded to their dtype; then its own again, bit for bit."""
        weights = [local_part(p) for p in self._parameters]
        kept = [weight.clone() for weight in weights]
        _copy(weights, [local_part(self.averages[p]) for p in self._parameters])
        float8.measure_weights(model)
        yield  # an error ends the run
        _copy(weights, kept)
        float8.measure_weights(model)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        averages = {f"{AVERAGES}{name}": self.averages[p] for name, p in model.named_parameters() if p in self.averages}
        return averages | {AVERAGE_UPDATES: self.updates}


def attach(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Lets the optimizer keep an EMA, which `ema_of` returns. decay: 0 for none."""
    if decay:
        optimizer.titanlite_ema = Ema(optimizer, decay)  # type: ignore[attr-defined]


def ema_of(optimizer: torch.optim.Optimizer) -> Ema | None:
    """The EMA that an optimizer keeps."""
    return getattr(optimizer, "titanlite_ema", None)


def begin_again(tensors: dict[str, Tensor], names: Collection[str]) -> None:
    """Makes the averages among these names, and those of the weights among them, equal to the weights. tensors: of a run, as
    `run_tensors` gives them."""
    weights = [name for name in tensors if name.startswith(WEIGHTS) and (name in names or average_of(name) in names)]
    averaged = [name for name in weights if average_of(name) in tensors]
    _copy([tensors[average_of(name)] for name in averaged], [tensors[name] for name in averaged])
    if AVERAGE_UPDATES in names:
        tensors[AVERAGE_UPDATES].zero_()


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
