"""What a rank holds as a step goes on: the parts of its memory at each moment, from which the peak of each phase follows."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

from titanlite.plan.layers import Layers
from titanlite.plan.step import MicrobatchMemory

PHASES = ("forward", "loss", "backward", "update")
_COLORS = ("#9fc9e8", "#f6c27a", "#8fd1b5", "#e8a9c6", "#f3e58a")  # of the parts: those of the docs' pictures
_LEFT, _TOP, _WIDE, _HIGH = 60, 60, 820, 260  # of the plot, in pixels


class MemoryEstimate(NamedTuple):
    """Bytes that a rank holds."""

    masters: int  # and a teacher's weights
    gradients: int  # those that exist: in the only microbatch of a step, of the layers whose backward pass is done
    moments: int  # and all else that the optimizer keeps
    activations: int  # what layers keep from the forward pass for the backward pass
    working: int  # the most beside all that: gathered parameters, one layer's recomputation, logits, ...

    @property
    def total(self) -> int:
        return sum(self)


class Moment(NamedTuple):
    """A layer runs, or another part of a step, and the rank holds the most during it."""

    phase: str  # one of PHASES
    name: str  # "layers.0", "embed", "head", a stage's microbatch, "optimizer"
    memory: MemoryEstimate


def highest(moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.memory.total)


def through_layers(layers: Layers, held: MicrobatchMemory, states: MemoryEstimate) -> list[Moment]:
    """A microbatch, forward and backward, through all layers, from the peaks of a few. states: what is there before.

    While a layer runs, those before it keep what they keep, and in the backward pass those after it have left gradients.
    """
    further = [name for name in held.kept if name not in layers.few]  # depths, which run after all layers
    few, whole, names = (
        ("embed", *each, *further, "head")
        for each in (layers.few, layers.stands_for.values(), [f"layers.{name}" for name in layers.stands_for])
    )
    moments = []
    blocks = range(len(names) - 1)
    order = [*(("forward", at) for at in blocks), ("loss", len(blocks)), *(("backward", at) for at in reversed(blocks))]
    for phase, at in order:
        if (scope := f"{phase} {whole[at]}") not in held.peaks:  # frozen layers have no backward pass
            continue
        kept, left = _around(whole, at, phase, held)
        working = held.peaks[scope] - sum(_around(few, few.index(whole[at]), phase, held))
        memory = MemoryEstimate(states.masters, states.gradients + left, states.moments, kept, max(0, working))
        moments.append(Moment(phase, names[at], memory))
    return moments


def _around(names: Sequence[str], at: int, phase: str, held: MicrobatchMemory) -> tuple[int, int]:
    """(bytes that layers keep, up to that at `at`; bytes that those behind it have left in the backward pass)."""
    left = sum(held.left[name] for name in names[at + 1 :]) if phase == "backward" else 0
    return sum(held.kept.get(name, 0) for name in names[: at + 1]), left


def picture(moments: Sequence[Moment], title: str) -> str:
    """An SVG of what is held at each moment, part upon part. All moments are equally wide: it shows an order and no times."""
    peak, wide = highest(moments), _WIDE / len(moments)
    below, shapes = [0] * len(moments), [_words(20, 28, title, 16), _words(_LEFT - 6, _TOP + _HIGH, "0", anchor="end")]
    for at, (part, color) in enumerate(zip(MemoryEstimate._fields, _COLORS, strict=True)):
        above = [low + getattr(each.memory, part) for low, each in zip(below, moments, strict=True)]
        outline = [*_steps(above, wide, peak.memory.total), *reversed(_steps(below, wide, peak.memory.total))]
        shapes.append(f'<polygon points="{" ".join(outline)}" fill="{color}"/>')
        shapes.append(f'<rect x="{20 + 145 * at}" y="362" width="14" height="14" fill="{color}"/>')
        shapes.append(_words(40 + 145 * at, 374, part))
        below = above
    begin = 0
    phases = [(phase, len(list(each))) for phase, each in groupby(each.phase for each in moments)]
    for phase, often in phases if len(phases) == len(PHASES) else []:  # those of a pipeline alternate
        if often > 1:
            shapes.append(_words(_LEFT + wide * (begin + often / 2), _TOP + _HIGH + 18, phase, anchor="middle"))
        begin += often
    x = _LEFT + wide * (moments.index(peak) + 0.5)
    most = f"{peak.memory.total / 2**30:.2f} GiB: {peak.phase}, {peak.name}"
    shapes.append(_words(x, _TOP - 8, most, anchor="middle" if 200 < x < 700 else "start" if x < 450 else "end"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 390" width="900" role="img"><title>{escape(title)}</title>'
    )
    return "\n".join([head, '<rect width="900" height="390" rx="6" fill="#ffffff"/>', *shapes, "</svg>"]) + "\n"


def _steps(heights: list[int], wide: float, highest: int) -> list[str]:
    """The corners of a line that stays at each height for a moment."""
    ends = [(number + side, height) for number, height in enumerate(heights) for side in (0, 1)]
    return [f"{_LEFT + wide * at:.1f},{_TOP + _HIGH * (1 - height / highest):.1f}" for at, height in ends]


def _words(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    font = f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="{size}" fill="#1f2937"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font}>{escape(words)}</text>'
