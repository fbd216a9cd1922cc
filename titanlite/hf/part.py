"""The notation of HF tables for a parameter that is only a part of a tensor there, or is transposed there."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

_NOTATION = re.compile(r"(?P<name>[^\[]+?)(\[(?P<first>\d+)::(?P<step>\d+)\])?(?P<transposed>\.mT)?")


class TensorPart(NamedTuple):
    """A tensor in Hugging Face's format as a parameter of ours: "name", or with one or both of "[first::step]" and ".mT".

    [first::step]: of its last dimension, every step-th column from `first` on. transposed: then the last two dimensions are
    swapped.
    """

    name: str
    first: int = 0
    step: int = 1
    transposed: bool = False

    @classmethod
    def of(cls, text: str) -> "TensorPart":
        """The part that an entry of a table means."""
        found = _NOTATION.fullmatch(text)
        assert found is not None, text
        return cls(found["name"], int(found["first"] or 0), int(found["step"] or 1), found["transposed"] is not None)

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor there. ours: of the parameter."""
        there = (*ours[:-2], ours[-1], ours[-2]) if self.transposed else tuple(ours)
        return (*there[:-1], there[-1] * self.step) if self.step > 1 else there

    def box(self, ours: tuple[slice, ...]) -> tuple[slice, ...]:
        """What to read there, in one piece, for a slice of the parameter."""
        there = (*ours[:-2], ours[-1], ours[-2]) if self.transposed else ours
        return (*there[:-1], slice(there[-1].start * self.step, there[-1].stop * self.step)) if self.step > 1 else there

    def view(self, there: Tensor) -> Tensor:
        """The parameter, or the slice of it, as a view of the tensor there, or of what `box` is of that."""
        part = there[..., self.first :: self.step] if self.step > 1 else there
        return part.mT if self.transposed else part
