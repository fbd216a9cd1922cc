"""What a part of your own must offer that a key of the configuration names as "package.module:name".

A part needs to import nothing of titanlite; these protocols say how it is called. Its options are keyword arguments, from the
table `options` of the same section. titanlite calls it on every rank, and the checks call it before any rank starts.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Decay(Protocol):
    """`lr_scheduler.decay_type`: the decay of the learning rate.

    def decay(step: int, start: int, end: int, **options) -> float

    Called for steps `start < step <= end`; options are passed by keyword. Every rank calls it for every step, often more than
    once, so it must be a pure function: the same numbers give the same result, in every process.
    """

    def __call__(self, step: int, start: int, end: int) -> float:
        """The share of the decaying rate that is left at a step, from 1.0 down to 0.0.

        The rate is lr * (min_lr_factor + (1 - min_lr_factor) * share). step: counted from 1. start: the last step at the full
        rate, 0 where a run has no warm-up. end: the first step at the minimum, after which the share stays what it is there:
        the last step of the schedule, or with min_lr_factor = 0 the step after it.
        """
        ...


class TokenLoss(Protocol):
    """`training.loss`: the loss of each token.

    def loss(logits: Tensor, labels: Tensor, **options) -> Tensor

    The head sums it over the labels of the step, and autograd differentiates it. Tokens come in chunks of any size, on every
    rank that has the last layer; under tensor parallelism every rank gets the logits of the whole vocabulary. It is called in
    the forward pass of training only: validation reports the cross entropy.
    """

    def __call__(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Losses (tokens,) of logits (tokens, vocab) float32 and labels (tokens,) int64, each a token of the vocabulary.

        Tokens without a label have the label 0; their losses are not counted. A token's loss may depend on its own row only.
        """
        ...


class Optimizer(Protocol):
    """`optimizer.name`: a class derived from `torch.optim.Optimizer`.

    class Mine(torch.optim.Optimizer):
        def __init__(self, params, lr, weight_decay=0.0, **options)

    params: groups, each a dict with pairs (name, parameter) in "params", its "weight_decay" if the class takes one, and more.
    lr and weight_decay belong into the defaults given to `torch.optim.Optimizer.__init__`; `group["lr"]` is set before each
    step. On a mesh, parameters and gradients are DTensors. Gradients are float32, averaged and clipped.
    """

    def step(self, closure: None = None) -> None:
        """Updates every parameter from its `grad`, which is never None.

        `self.state[parameter]` holds all that lasts from step to step: tensors of the parameter's shape (`torch.zeros_like`),
        or 0-d. The first step makes them, for all parameters.
        """
        ...
