"""Predicted against measured: once in a run on a GPU of devices.toml, with the likely cause of a difference."""

import contextlib
import itertools
import logging
import statistics
import time
from typing import NamedTuple

import torch

from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.launch.layout import number
from titanlite.loop.metrics import Clock
from titanlite.plan.job import MEMORY_ERROR, choice_of, errors_of, job_of, left_out
from titanlite.plan.report import GIB
from titanlite.plan.time import memory, peak_flops_of, shipped_as, step

log = logging.getLogger(__name__)

_WARM, _LAST = 5, 20  # steps 6 to 20 of a start are measured: the first ones compile and allocate
_THROTTLED = 0.6  # of a GPU's highest clock; matmuls at full power run at 0.7 to 0.9 of it


class Predicted(NamedTuple):
    """seconds: of a step. memory: GiB. error: relative, in the ninth decile of published runs. lacks: what is left out."""

    seconds: float
    memory: float
    error: float
    lacks: str = ""


class Measured(NamedTuple):
    """What a run has measured in steps 6 to 20. seconds: the median step. memory: GiB, the peak of the fullest rank."""

    seconds: float
    memory: float
    data_wait: float = 0.0  # share of the training time
    recompilations: int = 0
    clock: float | None = None  # of the GPU, relative to its highest; None where it is unknown
    paused: float = 0.0  # seconds of pauses for a second of training: an asynchronous save goes on behind the steps


def verdict(predicted: Predicted, measured: Measured) -> tuple[str, bool]:
    """(one line, whether it is a warning: the run is slower than it could be, or holds more than it should)."""
    slower, more = measured.seconds / predicted.seconds - 1, measured.memory / predicted.memory - 1
    text = (
        f"step time {measured.seconds:.3g} s, predicted {predicted.seconds:.3g} s ({slower:+.0%}, expected within "
        f"{predicted.error:.0%}); peak memory {measured.memory:.1f} GiB, predicted {predicted.memory:.1f} GiB ({more:+.0%}, "
        f"expected within {MEMORY_ERROR:.0%})"
    )
    if predicted.lacks:
        text += f"; the prediction leaves out {predicted.lacks}"
    found = []
    cause = _cause(1 - predicted.seconds / measured.seconds, measured)
    if slower > predicted.error and (cause or not predicted.lacks):
        found.append(f"slower than it could be: {cause or 'unexplained'}")
    if more > MEMORY_ERROR:
        found.append("more memory than predicted: unexplained")
    return "; ".join([text, *found]), bool(found)


def _cause(excess: float, measured: Measured) -> str:
    """The likely cause that so large a share of the step time was not predicted: what explains half of it, or may."""
    clock = 1.0 if measured.clock is None else measured.clock
    causes = {
        f"the GPU waits for data {measured.data_wait:.0%} of the time": measured.data_wait >= excess / 2,
        f"{measured.recompilations} graphs were compiled again": measured.recompilations > 0,
        f"the GPU is throttled to {clock:.0%} of its clock": clock < _THROTTLED,
        f"pauses, such as saves, take {measured.paused:.0%} of the training time": measured.paused >= excess / 2,
    }
    return next((cause for cause, applies in causes.items() if applies), "")


class Outlook:
    """Marks the steps of a start, and logs the verdict with the first report from step 20 on. Says nothing where `entry` has
    none, for a configuration that `plan` does not know, and where no published run shows how far a prediction errs."""

    def __init__(self, config: Config, device: torch.device, ranks: int, global_batch: int, clock: Clock, active: bool):
        """active: whether this rank logs."""
        self.config, self.device, self.ranks, self.global_batch, self.clock = config, device, ranks, global_batch, clock
        self.entry = entry(device) if active else None
        self.marks: list[tuple[float, float | torch.cuda.Event]] = []  # seconds of pauses so far; the end of a step
        self.waits: list[float] = []
        self.rate: float | None = None

    def step(self) -> None:
        """The end of a step's work; no host sync."""
        if self.entry is None:
            return
        end: float | torch.cuda.Event = time.perf_counter()
        if self.device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        self.marks.append((sum(self.clock.totals.values()), end))
        if len(self.marks) == _LAST:
            self.rate = clock_rate(self.device)  # while the GPU works

    def report(self, values: dict[str, float | None], recompilations: int) -> None:
        """With each report, and its values."""
        if self.entry is None or len(self.marks) <= _WARM:
            return
        waited, peak = values["data_wait_fraction"], values["peak_memory_gib"]
        assert waited is not None and peak is not None
        self.waits.append(waited)
        if len(self.marks) < _LAST:
            return
        marks = self.marks[_WARM - 1 :]
        # a pause before or after a step would count as a part of it
        steps = [_seconds(a, b) for (before, a), (after, b) in itertools.pairwise(marks) if before == after]
        predicted, self.entry = self._predicted(self.entry), None
        if predicted is None or not steps:
            return
        middle = statistics.median(steps)
        paused = (marks[-1][0] - marks[0][0]) / (middle * (len(marks) - 1))
        measured = Measured(middle, peak, statistics.mean(self.waits), recompilations, self.rate, paused)
        text, warned = verdict(predicted, measured)
        log.log(logging.WARNING if warned else logging.INFO, "%s", text)

    def _predicted(self, device: str) -> Predicted | None:
        try:
            job = job_of(self.config, device, number("LOCAL_WORLD_SIZE", self.ranks), self.global_batch)
            choice, errors = choice_of(self.config, self.ranks), errors_of(job, device)
            if errors is None:
                return None
            return Predicted(step(job, choice).total, memory(job, choice) / GIB, errors[1], left_out(self.config))
        except UserError:  # what plan refuses
            return None
        except Exception as error:  # a fork's model may lack what the model of time reads, which is no reason to end a run
            log.info("step time and memory are not predicted: %s", error)
            return None


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def entry(device: torch.device) -> str | None:
    """The name in devices.toml of this machine's GPU."""
    if device.type != "cuda":
        return None
    return shipped_as(torch.cuda.get_device_name(device))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's dense FLOP/s in bfloat16, or None for an unknown device or another precision."""
    if device.type != "cuda" or precision != "bfloat16":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def clock_rate(device: torch.device) -> float | None:
    """A GPU's clock relative to its highest; None without NVML's Python package, or where the driver does not say."""
    with contextlib.suppress(Exception):
        return torch.cuda.clock_rate(device) * 1000 / torch.cuda.get_device_properties(device).clock_rate
    return None
