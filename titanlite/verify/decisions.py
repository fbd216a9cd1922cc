"""Discrete choices of a forward pass, such as the experts of a token: recorded, and replayed in another pass.

Rounding flips a choice between nearly equal numbers, and later results then change by any amount. So two passes that differ by
rounding are compared with the same choices. The numbers behind the choices are compared too: a choice flips only where its
margin is smaller than the difference of these numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# function -> the index of `dim` among its arguments, and what it is by default; of those that return a tensor and indices, or
# indices alone
_CHOICES: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
    "max": (1, None),
    "min": (1, None),
    "argmax": (1, None),
    "argmin": (1, None),
}
_COMPARISONS = ("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal")


class Decisions(TorchFunctionMode):
    """Within it, a model makes the choices of an earlier pass.

    before: the outcomes of the earlier pass, in order; [] for the first pass. made: those of this pass. note: gets the scores
    of each choice in float32, less their mean where the model chooses among them: the mean decides nothing.
    """

    def __init__(self, before: list[Tensor], note: Callable[[Tensor], None]):
        super().__init__()
        self.before, self.note, self.made = before, note, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), getattr(func, "__name__", "").strip("_")
        scores = args[0] if args else kwargs.get("input")
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            return result
        if name in _COMPARISONS:
            return self._again(_margins(scores, args[1] if len(args) > 1 else kwargs["other"]), result)
        if name not in _CHOICES or (isinstance(result, Tensor) and result.is_floating_point()):
            return result  # a maximum without its index is no choice
        index, default = _CHOICES[name]
        dim = kwargs.get("dim", args[index] if len(args) > index else default)
        if isinstance(result, Tensor):
            return self._again(_centered(scores, dim), result)
        indices = self._again(_centered(scores, dim), result[1])
        if indices is result[1]:
            return result
        whole = indices if indices.ndim == scores.ndim else indices.unsqueeze(dim)
        values = scores.gather(dim, whole)
        return type(result)((values if whole is indices else values.squeeze(dim), indices))

    def _again(self, scores: Tensor, outcome: Tensor) -> Tensor:
        """The outcome of the earlier pass, if that made this choice."""
        index = len(self.made)
        if index < len(self.before) and self.before[index].shape == outcome.shape:
            outcome = self.before[index]
        self.made.append(outcome)
        self.note(scores)
        return outcome


@torch.no_grad()
def _centered(scores: Tensor, dim: int | None) -> Tensor:
    finite = torch.where(scores.isfinite(), scores, 0).float()
    return finite - (finite.mean() if dim is None else finite.mean(dim, keepdim=True))


@torch.no_grad()
def _margins(first: Tensor, second: Tensor | float) -> Tensor:
    """first - second, stacked with the sum of their sizes, to which margins are relative."""
    both = torch.broadcast_tensors(first.float(), torch.as_tensor(second, device=first.device).float())
    values = torch.stack([both[0] - both[1], both[0].abs() + both[1].abs()])
    return torch.where(values.isfinite(), values, 0)
