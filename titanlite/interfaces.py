"""What a part of your own must offer that a key of the configuration names as "package.module:name".

A part needs to import nothing of titanlite; these protocols say how it is called. Its options are keyword arguments, from the
table `options` of the same section. titanlite calls it on every rank, and the checks call it before any rank starts.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


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


class Metric(Protocol):
    """`metrics.extra`: numbers for each report.

    def metric(model, microbatch, **options) -> dict[str, float | tuple[float, float]]

    Every rank calls it at reports, after validation, without gradients and dropout. NAME is reported as extra/NAME: the sum
    over ranks divided by the count over ranks, null where that is not finite. A pair (sum, count) gives the mean of what was
    counted, on every mesh the same where all that a name counts has as many copies; a number is the pair (number, 1).
    """

    def __call__(self, model: "nn.Module", microbatch: object) -> "dict[str, float | tuple[float, float]]":
        """model: a Decoder of models/decoder.py with this rank's shards; of a pipeline, its stages, which must not be called.

        microbatch: this rank's part of the step's last one: inputs (batch, seq) int64, labels (batch, seq) int64 with -100
        where there are none, and seq, so that model(microbatch.inputs, microbatch.seq) is the forward pass. All ranks call the
        model, or none: FSDP gathers its parameters from all of them.
        """
        ...


class Hooks(Protocol):
    """`hooks.modules`: a module with any of these functions, without `self`.

    Every rank calls them at the same points, so they may use collectives. An exception ends the run. Code that moves weights is
    part of what is computed: it must do the same on every mesh, and may keep no state, which no checkpoint has. `titanlite
    replay` and `verify` call the first two.
    """

    def after_building(self, model: "nn.Module", config: object) -> None:
        """Once, when the model is sharded and has the weights that the run begins with. config: a Config of the schema."""
        ...

    def after_step(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        """After each optimizer step, also one that was skipped. Gradients are cleared. step: counted from 1."""
        ...

    def at_report(self, step: int, values: dict[str, Any]) -> "dict[str, float | tuple[float, float]] | None":
        """At each report, of whose values it gets a copy; may return more numbers, as a `Metric`."""
        ...

    def at_save(self, step: int, folder: Path) -> None:
        """After a checkpoint was handed to the disk. folder: its final path; with checkpoint.async_mode it appears later."""
        ...
