"""Which differences rounding explains: each gradient's noise, measured before a comparison, and gradients in float64.

Terms of a gradient that cancel leave their rounding errors. A learned factor on the residual stream, for example, has almost no
effect, because a norm follows; float32 rounding then changes its gradient by a thousandth.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.blocks import Normal
from titanlite.data.batch import Batch
from titanlite.launch import process
from titanlite.loop.step import forward_backward
from titanlite.parallel.mesh import rng_rank
from titanlite.transforms.initialize import fill
from titanlite.verify.compare import FLOAT32, MARGIN, Comparison, Difference, Run, Trajectory, relative_difference, whole

FLOAT64 = {"training": dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float64")}
_ROUNDING = 2.0**-24  # relative, of a float32
_PERTURBED = 4  # runs; in one run of ten, the noise of a single value is small by chance

Build = Callable[[], Run]


def gradients(run: Run, batch: Batch) -> dict[str, Tensor]:
    """The gradients of this rank's part of a batch, whole and on the CPU, without a step."""
    process.seed_step(run.config.training.seed, 1, rng_rank(run.mesh))
    forward_backward(run.model, batch.to(run.device), run.mesh, run.loss_scale)
    return run.of_all_stages({name: whole(gradient) for name, gradient in run.gradients()})


def noise_of(build: Build, batch: Batch) -> dict[str, float]:
    """How far rounding changes each gradient, relative to its norm.

    The largest change of several runs: with each weight changed by about one rounding error, as other kernels and other sums
    of activations change what follows; with the batch in another order; with each microbatch split in two. The last two may
    exceed the first by MARGIN at most: a larger change is no rounding, such as a loss that depends on the microbatch. Each run
    has a model of its own, because a model may keep state.
    """
    reference = gradients(build(), batch)
    noise = dict.fromkeys(reference, 0.0)

    def change(run: Run, batch: Batch) -> dict[str, float]:
        values = gradients(run, batch)
        return {name: relative_difference(values.get(name), reference[name]) for name in noise}

    for seed in range(_PERTURBED):
        run = build()
        _perturb(run.model, seed)
        noise = {name: max(noise[name], size) for name, size in change(run, batch).items()}
    most = {name: max(FLOAT32, MARGIN * size) for name, size in noise.items()}
    for other in (batch.each(lambda rows: rows.flatten(0, 1).flip(0).view_as(rows)), batch.each(_split)):
        noise = {name: max(noise[name], size if size <= most[name] else 0.0) for name, size in change(build(), other).items()}
    return noise


def _split(rows: Tensor) -> Tensor:
    """Microbatches (microbatches, local_batch, ...) of half the size, or of one row."""
    local = rows.shape[1]
    return rows.flatten(0, 1).unflatten(0, (-1, local // 2 if local % 2 == 0 else 1))


@torch.no_grad()
def _perturb(model: nn.Module, seed: int) -> None:
    """Changes each weight by about its rounding error, by the same on every mesh."""
    for name, parameter in model.named_parameters():
        factor = torch.empty_like(parameter)
        fill(factor, f"rounding of {name}", Normal(_ROUNDING), seed)
        parameter.mul_(1 + factor)


def tolerances(comparison: Comparison) -> list[str]:
    """A line for the tolerances of gradients that noise has raised."""
    raised = sorted((each for each in comparison.of("gradients") if each.tolerance > FLOAT32), key=lambda each: -each.noise)
    shown = ", ".join(f"{each.where} {each.noise:.1e} (tolerance {each.tolerance:.1e})" for each in raised[:4])
    more = f", and {len(raised) - 4} more" if len(raised) > 4 else ""
    return [f"rounding alone changes the gradient of {shown}{more}"] if raised else []


# ---------------------------------------------------------------------------------------------------------------- float64


class _Widened(TorchFunctionMode):
    """Computes in float64 where a model requests float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if func is torch.Tensor.float else func
        return function(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def gradients_in_float64(build: Build, batches: Callable[[Run], Iterator[Batch]]) -> dict[str, Tensor]:
    """The gradients of the first batch, in float64. build: makes a run whose configuration has the keys FLOAT64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of new tensors, such as buffers
    try:
        run = build()
        with _Widened():
            return gradients(run, next(iter(batches(run))))
    finally:
        torch.set_default_dtype(before)


def settle(
    trajectory: Trajectory, reference: Trajectory, wide: dict[str, Tensor], wide_reference: dict[str, Tensor]
) -> Comparison:
    """Compares the gradients of two runs in float64, where their float32 runs left open whether they differ.

    Rounding shrinks by nine digits in float64, and a fault does not. The difference is relative to the larger of the gradient
    and its float32 difference: a gradient that is zero, but for rounding, has no size of its own. A difference that shrinks to
    less than a tenth, and not far enough, is undecided: the model rounds somewhere to float32 or less.
    """
    differences = []
    for name in reference.gradients:
        value, expected = wide.get(name), wide_reference.get(name)
        if value is None or expected is None:
            continue  # float32 has compared which parameters have a gradient
        in_float32 = (trajectory.gradients[name].double() - reference.gradients[name].double()).norm().item()
        difference, norm = (value - expected).norm().item(), expected.norm().item()
        size = difference / (max(norm, in_float32) or 1.0)
        shrinks = difference < in_float32 / MARGIN
        differences.append(Difference("gradients", name, size, FLOAT32, noise=size if shrinks else 0.0))
    return Comparison(differences)
