"""Where the mixture of a run began, and how many samples of each source came before.

The next samples of a run follow from its position and its origin. The origin is the run's first sample until the sources or
their weights change. Then the checkpoint where they changed is another, from which each source continues with its next sample.
"""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from titanlite.data.order import MIXTURE, drawn


class Reached(NamedTuple):
    """How far a source had come. Its fingerprint identifies it: files may move, and names may change."""

    fingerprint: str
    order: int  # names its permutations, together with the seed
    drawn: int = 0  # its samples before the origin
    replaced: int = 0  # its samples, at any time, that rollbacks left out and the run replaces: `epochs` does not count them


class Origin(NamedTuple):
    """Where a mixture began."""

    position: int  # samples of the run before it
    sources: tuple[Reached, ...]  # those of the mixture in its order, then those that the run no longer reads

    def numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return {"position": self.position, "sources": [source._asdict() for source in self.sources]}


def beginning(fingerprints: Iterable[str]) -> Origin:
    """The origin of a run's first sample."""
    return Origin(0, tuple(Reached(fingerprint, number) for number, fingerprint in enumerate(fingerprints)))


def continued(numbers: dict[str, Any], sources: list[dict[str, Any]]) -> Origin:
    """The origin of a run that continues from a checkpoint: that of the checkpoint, or the checkpoint if the mixture changed.

    numbers: of the checkpoint's manifest. sources: of `Data.describe`, which `numbers` hold for the run before.
    """
    before, stored = numbers["data"]["sources"], numbers["mixture"]
    origin = Origin(stored["position"], tuple(Reached(**source) for source in stored["sources"]))
    if _mixture(before) == _mixture(sources):
        return origin
    counts = drawn(numbers["samples"] - origin.position, _shares(before))
    counts += [0] * (len(origin.sources) - len(counts))
    known = [reached._replace(drawn=reached.drawn + n) for reached, n in zip(origin.sources, counts, strict=True)]
    fresh = itertools.count(max(reached.order for reached in known) + 1)
    present = []
    for source in sources:
        same = next((reached for reached in known if reached.fingerprint == source["fingerprint"]), None)
        present.append(same or Reached(source["fingerprint"], next(fresh)))
        if same:
            known.remove(same)  # two sources may have the same text
    return Origin(numbers["samples"], (*present, *known))


def _mixture(sources: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(source["fingerprint"], source["share"]) for source in sources]


def _shares(sources: list[dict[str, Any]]) -> list[int]:
    """Integers in the proportion of the shares: a float64 determines a fraction whose denominator is at most 2^20."""
    shares = [Fraction(source["share"]).limit_denominator(MIXTURE) for source in sources]
    unit = math.lcm(*(share.denominator for share in shares))
    return [int(share * unit) for share in shares]
