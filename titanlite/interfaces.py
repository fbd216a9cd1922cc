"""The interface of your own code, which a configuration key names as "package.module:name".

Your code need not import titanlite; these protocols say how it is called. Its options are keyword arguments, from the
table `options` of the same section. titanlite calls it on every rank, and the checks call it before any rank starts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

# One row of a batch: its ids, or a tuple of its ids, its loss mask and the ends of its documents; the last two may be None or
# left out. ids: 1 to seq_len + 1 integers, as a list, an array or a tensor; the labels are the ids, one position on, and a
# shorter row is padded. loss mask: a bool for each id, True where it is a label. ends: increasing counts of ids after which a
# document ends, for training.document_mask.
Row = Sequence[int] | tuple[Sequence[int], Sequence[bool] | None, Sequence[int] | None]


class Decay(Protocol):
    """`lr_scheduler.decay_type`: the decay of the learning rate.

    def decay(step: int, start: int, end: int, **options) -> float

    Called for steps `start < step <= end`; options are passed by keyword. Every rank calls it for every step, often more than
    once, so it must be a pure function: the same numbers give the same result, in every process.
    """

    def __call__(self, step: int, start: int, end: int) -> float:
        """The fraction of the decaying rate that is left at a step, from 1.0 down to 0.0.

        The rate is lr * (min_lr_factor + (1 - min_lr_factor) * fraction). step: counted from 1. start: the last step at the
        full rate, 0 where a run has no warm-up. end: the first step at the minimum, after which the fraction stays constant:
        the last step of the schedule, or with min_lr_factor = 0 the step after it.
        """
        ...


class TokenLoss(Protocol):
    """`training.loss`: the loss of each token.

    def loss(logits: Tensor, labels: Tensor, **options) -> Tensor

    The head sums it over the labels of the step, and autograd differentiates it. Tokens come in chunks of any size, on every
    rank that has the last layer; under tensor parallelism every rank gets the logits of the whole vocabulary. It is called in
    the forward pass of training only: validation reports the cross entropy. With `distillation.teacher` it must take the
    keyword argument teacher_logits too: a second model's logits of the same tokens, as `logits`, without gradients.
    """

    def __call__(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Losses (tokens,) of logits (tokens, vocab) float32 and labels (tokens,) int64, each a token of the vocabulary.

        Tokens without a label have the label 0; their losses are not counted. A token's loss may depend on its own row only.
        """
        ...


class Map(Protocol):
    """`training.dataset`, and `path` of `training.sources`; those of `validation` too: a map-style dataset.

    class Map: def __init__(self, [seq_len,] **options)

    A class, or a function that returns such an object; `seq_len` is passed where it is an argument. Every rank and every data
    worker makes an object of its own by this name, so that it need not be pickled, and reads any samples in any order: `read`
    must be a function of `i` and the options. With `__len__` it has epochs, each in an order of its own; without, sample i is
    the i-th that is drawn. An attribute `fingerprint`, a string, may identify what else it reads, such as files: a resume with
    another fingerprint is refused.
    """

    def read(self, i: int) -> Row:
        """Sample i, from 0 on, as one row."""
        ...


class Stream(Protocol):
    """`training.dataset`: an iterable-style dataset: a torch IterableDataset, a node of torchdata, or any such object.

    class Stream: def __init__(self, rank, degree, [seq_len,] **options)

    One for each data rank; ranks that split a sequence, a layer or a model read the same rows. A torchdata node has `reset`
    instead of `load_state_dict`. A static method `reshard(states: list, degree: int) -> list` gives the states for another
    number of data ranks; without it, a resume on another number is refused.
    """

    def __iter__(self) -> Iterator[Row]:
        """The rows, without end, from the beginning or from the loaded state."""
        ...

    def state_dict(self) -> Any:
        """The state after the last row: numbers, strings, None, lists, dicts with string keys; every checkpoint stores it."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continues from a state, before `__iter__` is called."""
        ...


class Metric(Protocol):
    """`metrics.extra`: numbers for each report.

    def metric(model, microbatches, **options) -> dict[str, float | tuple[float, float]]

    Every rank calls it at reports, after validation, without gradients and dropout. NAME is reported as extra/NAME: the sum
    over ranks divided by the count over ranks, null where that is not finite. A pair (sum, count) gives a mean, which is the
    same on every mesh if all counted items have equally many copies; a number is the pair (number, 1).
    """

    def __call__(self, model: "nn.Module", microbatches: Sequence[Any]) -> "dict[str, float | tuple[float, float]]":
        """model: a Decoder of models/decoder.py with this rank's shards; in a pipeline, with the blocks of this rank's stages.

        microbatches: this rank's part of the step. Each has inputs (batch, seq) int64, labels (batch, seq) int64 with -100
        where there are none, and seq, so that model(each.inputs, each.seq) is the forward pass. In a pipeline the model cannot
        be called; model.pipeline.evaluate(microbatches) runs all forward passes. All ranks must run the same forward passes, or
        none: FSDP gathers parameters from all ranks.
        """
        ...


class Hooks(Protocol):
    """`hooks.modules`: a module with any of these functions, without `self`.

    Every rank calls them at the same points, so they may use collectives. An exception ends the run. Code that changes weights
    must do the same on every mesh, and must not keep state, since checkpoints do not store it. `titanlite replay` and `verify`
    call the first three.
    """

    def after_building(self, model: "nn.Module", config: object) -> None:
        """Once at every start, when the model is sharded and has its weights: after a resume those of the checkpoint, so that
        code which sets initial weights undoes a resume. config: a Config of the schema."""
        ...

    def before_step(self, step: int, model: "nn.Module", optimizer: "optim.Optimizer") -> None:
        """Before the forward pass of each step, also one that is repeated: to train a parameter from some step on, freeze it
        here until then. step: counted from 1. The learning rates of the optimizer's groups are set afterwards."""
        ...

    def after_step(self, step: int, model: "nn.Module", optimizer: "optim.Optimizer") -> None:
        """After each optimizer step, also a skipped one. Gradients are cleared. step: counted from 1."""
        ...

    def at_report(self, step: int, values: dict[str, Any]) -> "dict[str, float | tuple[float, float]] | None":
        """At each report, with a copy of its values, those of `metrics.extra` and of the modules before this one included; may
        return more numbers, as a `Metric` does."""
        ...

    def at_save(self, step: int, folder: Path) -> None:
        """After a checkpoint was written. folder: its final path; with checkpoint.async_mode it appears later. The next step
        of the other ranks fails after comm.train_timeout_seconds: work that takes longer belongs in a thread."""
        ...


class Optimizer(Protocol):
    """`optimizer.name`: a class derived from `torch.optim.Optimizer`.

    class Mine(torch.optim.Optimizer):
        def __init__(self, params, lr, weight_decay=0.0, **options)

    params: groups, each a dict with pairs (name, parameter) in "params", its "weight_decay" if the class takes one, and more.
    lr and weight_decay belong in the defaults given to `torch.optim.Optimizer.__init__`; `group["lr"]` is set before each
    step. On a mesh, parameters and gradients are DTensors. Gradients are float32, averaged and clipped. `group` is passed where
    it is an argument: the process group of the ranks with the same layers, None if all ranks have the same.
    """

    def step(self, closure: None = None) -> None:
        """Updates every parameter from its `grad`, which is never None.

        `self.state[parameter]` holds everything that persists between steps: tensors of the parameter's shape
        (`torch.zeros_like`), or 0-d. The first step creates them, for all parameters.
        """
        ...
