"""The coordinate check of muP: how large the activations of a model are at several widths, after each of a few steps.

Yang et al., "Tensor Programs V", arXiv:2203.03466, appendix D.1. The models train on one random batch, without warm-up.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch
from torch import Tensor, nn

from titanlite.config.schema import Optimizer
from titanlite.ground.errors import UserError
from titanlite.loop.loss import sequence_of
from titanlite.optim.build import build_optimizer, set_lr
from titanlite.registry.family import Family
from titanlite.registry.overrides import overridden
from titanlite.transforms.initialize import initialize

FACTORS = (0.25, 0.5, 1.0, 2.0)  # widths relative to the flavor's
STEPS, SEEDS, ROWS, TOKENS, VOCABULARY, RATE = 4, 2, 4, 32, 512, 0.01
_WIDTHS = ("dim", "n_heads", "n_kv_heads", "ffn_dim", "expert_dim")  # the fields of a Config that grow together
# The exponent of the width is 0 with muP. With one deviation at every width, a matrix's result has 1/2 before the first step,
# and up to 1 later. The bound is halfway to the smallest of these.
BOUND = 0.25


class Measured(NamedTuple):
    """Mean absolute values; sizes[name][step][width], step 0 before training, means over seeds."""

    widths: list[int]
    sizes: dict[str, list[list[float]]]  # of each block's output, and of "logits"

    def exponent(self, name: str, step: int) -> float:
        """The exponent of the width: log size is fitted to log width by least squares; infinite where a size is not finite."""
        sizes = self.sizes[name][step]
        if not all(math.isfinite(size) and size > 0 for size in sizes):
            return math.inf
        return statistics.linear_regression([*map(math.log, self.widths)], [*map(math.log, sizes)]).slope


def at_width(family: Family, factor: float) -> Family:
    """The family at `factor` times its width, with the same head_dim. Raises UserError where a size is not divisible."""
    fields = {field.name: getattr(family.config, field.name) for field in dataclasses.fields(family.config)}
    wider = {name: fields[name] * factor for name in _WIDTHS if fields.get(name)}
    if broken := [name for name, value in wider.items() if value < 1 or value % 1]:
        raise UserError(f"{', '.join(broken)}: cannot be {factor:g} times as large; name another flavor, or --model.overrides")
    overrides: dict[str, Any] = {name: int(value) for name, value in wider.items()} | {"vocab_size": VOCABULARY}
    config = overridden(family.config, overrides, [family.config], family.module.__name__)
    return Family(family.module, config)


def measure(family: Family) -> Measured:
    """Trains the family at each width for STEPS steps of AdamW on the CPU. Raises UserError for sizes that do not divide."""
    wider = [at_width(family, factor) for factor in FACTORS]
    runs = [[_sizes_of(each, seed) for seed in range(SEEDS)] for each in wider]
    steps = range(STEPS + 1)
    sizes = {name: [[sum(run[name][step] for run in seeds) / SEEDS for seeds in runs] for step in steps] for name in runs[0][0]}
    return Measured([each.config.dim for each in wider], sizes)


def _sizes_of(family: Family, seed: int) -> dict[str, list[float]]:
    """The mean absolute output of each block, and of the logits, before each step and after the last."""
    model = family.on_meta()
    initialize(model, family, seed, torch.device("cpu"))
    optimizer = build_optimizer(model, Optimizer(lr=RATE, weight_decay=0.0, implementation="for-loop"))
    set_lr(optimizer, RATE)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    sizes: dict[str, list[float]] = {}

    def recording(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def record(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output = output[0] if isinstance(output, tuple) else output
            size = output.detach().float().abs().mean().item()
            sizes.setdefault(name, [math.nan] * (STEPS + 1))[step] = size  # the last, of a block that runs several times

        return record

    for number, block in model.layers.items():
        block.register_forward_hook(recording(f"layers.{number}"))
    assert model.head is not None
    for step in range(STEPS + 1):
        hidden = model(inputs, sequence_of(inputs, None))
        with torch.no_grad():
            sizes.setdefault("logits", []).append(model.head(hidden).float().abs().mean().item())
        if step < STEPS:
            optimizer.zero_grad()
            (model.head(hidden, labels) / labels.numel()).backward()
            optimizer.step()
    return sizes


def growing(measured: Measured) -> list[str]:
    """A sentence for each block, and the logits, whose size after the last step depends on the width.

    Before the first step, muP's logits shrink as 1 / sqrt(width): its output projection has an initial deviation of 1 / width.
    """
    found = {name: measured.exponent(name, STEPS) for name in measured.sizes}
    return [
        f"{name}: after {STEPS} steps its size is width^{exponent:+.2f}; with muP the exponent is within {BOUND} of 0"
        for name, exponent in found.items()
        if abs(exponent) > BOUND
    ]


def table(measured: Measured) -> str:
    """Text: a row for each tensor and step."""
    lines = [f"{'mean |x|':<14}{'steps':>6}" + "".join(f"{width:>10}" for width in measured.widths) + f"{'exponent':>10}"]
    for name, of_steps in measured.sizes.items():
        for step, sizes in enumerate(of_steps):
            numbers = "".join(f"{size:>10.4f}" for size in sizes)
            lines.append(f"{name:<14}{step:>6}{numbers}{measured.exponent(name, step):>+10.2f}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the picture

_SIZE, _PAD, _COLORS = (230, 170), 42, ("#9ca3af", "#f6c27a", "#8fd1b5", "#6aa5d8", "#1f2937")  # of steps 0 to 4


def picture(measured: Measured) -> str:
    """SVG: a panel for each tensor, with its size against the width, both logarithmic, and a line for each step."""
    (width, height), count = _SIZE, len(measured.sizes)
    shapes = [_panel(measured, name, index * width) for index, name in enumerate(measured.sizes)]
    legend = "".join(
        f'<text x="{_PAD + 90 * step}" y="{height + 16}" fill="{color}">{step} steps</text>'
        for step, color in enumerate(_COLORS)
    )
    paper = f'<rect width="{count * width}" height="{height + 26}" fill="#ffffff"/>'
    head = f'viewBox="0 0 {max(count * width, 520)} {height + 26}" font-family="DejaVu Sans, sans-serif" font-size="11"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {head} role="img">', paper, *shapes, legend, "</svg>"]) + "\n"


def _panel(measured: Measured, name: str, left: float) -> str:
    width, height = _SIZE[0] - _PAD - 8, _SIZE[1] - _PAD - 8
    finite = [size for row in measured.sizes[name] for size in row if math.isfinite(size) and size > 0] or [1.0]
    low, high = math.log10(min(finite) / 1.5), math.log10(max(finite) * 1.5)
    x_of = [left + _PAD + width * index / (len(measured.widths) - 1) for index in range(len(measured.widths))]
    shapes = [f'<rect x="{left + _PAD}" y="22" width="{width}" height="{height}" fill="none" stroke="#9ca3af"/>']
    shapes += [f'<text x="{left + _PAD}" y="14" fill="#1f2937">{escape(name)}, mean |x|</text>']
    for value, y in ((10**high, 30), (10**low, 22 + height)):
        shapes.append(f'<text x="{left + _PAD - 4}" y="{y}" text-anchor="end" fill="#6b7280">{value:.2g}</text>')
    for x, dim in zip(x_of, measured.widths, strict=True):
        shapes.append(f'<text x="{x:.1f}" y="{height + 36}" text-anchor="middle" fill="#6b7280">{dim}</text>')
    for step, sizes in enumerate(measured.sizes[name]):
        shown = [(x, size) for x, size in zip(x_of, sizes, strict=True) if math.isfinite(size) and size > 0]
        points = " ".join(f"{x:.1f},{22 + height * (high - math.log10(size)) / (high - low):.1f}" for x, size in shown)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{_COLORS[step]}" stroke-width="2"/>')
    return "".join(shapes)
