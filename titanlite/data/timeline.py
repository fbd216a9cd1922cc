"""Which samples each step of a run has, with all resumes, changed mixtures and rollbacks.

A run is a list of segments, which every checkpoint holds. A step follows from its segment; there is no other state of the data:

    first_step 1    first_sample 0     global_batch 8                 steps 1, 2, ... have the samples 0-7, 8-15, ...
    first_step 6    first_sample 64    global_batch 8   skipped 24    a rollback to step 5 has left out the samples 40-63
    first_step 21   first_sample 184   global_batch 16                resumed after step 20 with another global batch
    first_step 31   first_sample 344   global_batch 16  began 344     resumed after step 30 with other sources or weights

Within a mixture, the samples of its sources are interleaved from its first sample on. Where another mixture begins, each source
continues with its next sample.
"""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from titanlite.data.order import MIXTURE, drawn
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import Count, FileSchema, Positive, validated

Mixture = list[tuple[str, int]]  # fingerprint and share of each source, in the order of the configuration


class SourceState(NamedTuple):
    """The position of a source where a mixture began. Its fingerprint identifies it: files may move, names may change."""

    fingerprint: str
    order: Count  # names its permutations, together with the seed
    drawn: Count = 0  # its samples before the mixture
    replaced: Count = 0  # those of them that rollbacks left out, and that later samples have replaced
    share: Count = 0  # of the mixture's samples, in proportion to the others; 0: the run no longer reads the source


class Segment(NamedTuple):
    """Steps with one global batch and one mixture, whose samples follow each other; it ends where the next segment begins."""

    first_step: Positive
    first_sample: Count  # of its first step, counted over the run
    global_batch: Positive
    began: Count  # the first sample of its mixture
    skipped: Count  # samples since then that rollbacks have left out
    sources: list[SourceState]  # those of the mixture in its order, then those that the run no longer reads

    @property
    def mixture(self) -> Mixture:
        return [(source.fingerprint, source.share) for source in self.sources if source.share]

    def drawn(self, sample: int) -> list[int]:
        """How many samples of each source come before a sample of the run."""
        shares = [share for _, share in self.mixture]
        counts = drawn(sample - self.began, shares) + [0] * (len(self.sources) - len(shares))
        return [source.drawn + count for source, count in zip(self.sources, counts, strict=True)]

    def read(self, sample: int) -> list[int]:
        """The same without what rollbacks left out: a run that fits its `epochs` still fits after any number of rollbacks."""
        return [count - source.replaced for source, count in zip(self.sources, self.drawn(sample - self.skipped), strict=True)]


class Rollback(NamedTuple):
    """A return to a checkpoint, from which the run went on with a later sample than before."""

    found_at: int  # the last step that it undid
    to_step: int
    next_sample: int


class Timeline(NamedTuple):
    """The segments of a run, by their first steps."""

    segments: list[Segment]

    def at(self, step: int) -> tuple[Segment, int]:
        """The segment of a step, and the step's first sample."""
        if step < self.segments[0].first_step:
            raise UserError(f"step {step}: which samples it had is not known; titanlite 0.2 did not record it")
        segment = next(segment for segment in reversed(self.segments) if segment.first_step <= step)
        return segment, segment.first_sample + (step - segment.first_step) * segment.global_batch

    def seen(self, step: int) -> int:
        """The samples up to a step of the last segment, without those that rollbacks left out."""
        ends = [*(segment.first_step for segment in self.segments[1:]), step + 1]
        counts = ((end - each.first_step) * each.global_batch for each, end in zip(self.segments, ends, strict=True))
        return self.segments[0].first_sample + sum(counts)

    def numbers(self) -> list[dict[str, Any]]:
        """For a checkpoint's manifest."""
        return [{**segment._asdict(), "sources": [each._asdict() for each in segment.sources]} for segment in self.segments]

    def resumed(self, step: int, global_batch: int, mixture: Mixture) -> "Timeline":
        """The timeline of a run that continues after a step with this global batch and mixture."""
        segment, sample = self.at(step + 1)
        if (global_batch, mixture) == (segment.global_batch, segment.mixture):
            return self
        began = segment._replace(first_step=step + 1, first_sample=sample, global_batch=global_batch)
        if mixture != segment.mixture:
            began = began._replace(began=sample, skipped=0, sources=_continued(segment, sample, mixture))
        return self._and_then(began)

    def rolled_back(self, to_step: int, next_sample: int) -> "Timeline":
        """The timeline of a run that goes back to a step, and continues from there with a later sample."""
        segment, sample = self.at(to_step + 1)
        skipped = segment.skipped + next_sample - sample
        return self._and_then(segment._replace(first_step=to_step + 1, first_sample=next_sample, skipped=skipped))

    def after(self, step: int, rollbacks: Iterable[Rollback]) -> "Timeline":
        """The timeline of a run that went on from the checkpoint of a step, whose timeline this is, with these rollbacks."""
        timeline = self
        for rollback in rollbacks:
            if rollback.to_step >= step:
                timeline = timeline.rolled_back(rollback.to_step, rollback.next_sample)
        return timeline

    def _and_then(self, segment: Segment) -> "Timeline":
        return Timeline([*(each for each in self.segments if each.first_step < segment.first_step), segment])


def begin(global_batch: int, mixture: Mixture) -> Timeline:
    """The timeline of a new run."""
    sources = [SourceState(fingerprint, number, share=share) for number, (fingerprint, share) in enumerate(mixture)]
    return Timeline([Segment(1, 0, global_batch, 0, 0, sources)])


def _continued(before: Segment, sample: int, mixture: Mixture) -> list[SourceState]:
    """The sources of a mixture that follows a segment at a sample; what was never read begins with its first sample."""
    counts = zip(before.sources, before.drawn(sample), before.read(sample), strict=True)
    known = [source._replace(drawn=count, replaced=count - read, share=0) for source, count, read in counts]
    fresh = itertools.count(max(source.order for source in known) + 1)
    present = []
    for fingerprint, share in mixture:
        same = next((source for source in known if source.fingerprint == fingerprint), None)
        present.append((same or SourceState(fingerprint, next(fresh)))._replace(share=share))
        if same:
            known.remove(same)  # two sources may have the same text
    return [*present, *known]


def attempts_at(step: int, rollbacks: list[Rollback]) -> list[int]:
    """How many rollbacks came before each attempt at a step, the first attempt first."""
    begins, ends = [0, *(each.to_step for each in rollbacks)], [*(each.found_at for each in rollbacks), math.inf]
    return [number for number, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < step <= end]


# ----------------------------------------------------------------------------------------------------- what checkpoints hold


class _TimelineSchema(FileSchema):
    timeline: list[Segment]


class _Mixture(FileSchema):
    position: Count
    sources: list[SourceState]


def stored(numbers: dict[str, Any], owner: str) -> Timeline:
    """The timeline in the numbers of a run's manifest, also of one that titanlite 0.2 has written.

    owner: names the checkpoint. Raises UserError where its numbers do not fit together.
    """
    known = "timeline" in numbers
    timeline = Timeline(validated(_TimelineSchema, numbers, owner).timeline) if known else _of_0_2(numbers, owner)
    steps, segments = [segment.first_step for segment in timeline.segments], timeline.segments
    sources = [source["fingerprint"] for source in numbers["data"]["sources"]]
    if (
        not segments
        or steps != sorted(set(steps))
        or any(each.began + each.skipped > each.first_sample or not each.mixture for each in segments)
        or [fingerprint for fingerprint, _ in segments[-1].mixture] != sources
        or timeline.at(numbers["step"] + 1)[1] != numbers["samples"]
    ):
        raise UserError(f"{owner}: its timeline does not lead to its step, samples and data.sources")
    return timeline


def _of_0_2(numbers: dict[str, Any], owner: str) -> Timeline:
    """titanlite 0.2 stored where the mixture began: one segment from there, as if nothing had changed since.

    What follows the checkpoint is exact. Samples of earlier steps are not, where a rollback or another batch came between.
    """
    mixture = validated(_Mixture, numbers["mixture"], f"{owner}: mixture")
    size, step, samples = numbers["global_batch"], numbers["step"], numbers["samples"]
    steps = max(0, min(step, (samples - mixture.position) // size))
    # A float64 determines a fraction whose denominator is at most 2^20.
    shares = [Fraction(source["share"]).limit_denominator(MIXTURE) for source in numbers["data"]["sources"]]
    unit = math.lcm(*(share.denominator for share in shares))
    sources = zip(mixture.sources, [int(share * unit) for share in shares] + [0] * len(mixture.sources), strict=False)
    known = [source._replace(share=share) for source, share in sources]
    return Timeline([Segment(step + 1 - steps, samples - steps * size, size, mixture.position, 0, known)])
