"""Divergence: losses and gradient norms that are not finite, and losses that spike.

A step's loss and norm stay on the device until the next host sync, at a report or a checkpoint. All ranks then judge every step
since the last reading, in order. Incidents go to the log and, one JSON object a line, to incidents.jsonl in the run
directory. `titanlite replay` repeats such a step.
"""

import json
import logging
import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import Config
from titanlite.data.timeline import Rollback, attempts_at
from titanlite.ground.errors import UserError
from titanlite.ground.files import replace_file, tolerated
from titanlite.ground.run_files import INCIDENTS, METRICS, read_entries, read_reports
from titanlite.loop.loss import StepLoss
from titanlite.loop.metrics import finite
from titanlite.optim.loss_scale import LEAST

log = logging.getLogger(__name__)

# At most this many steps in a row are skipped. After that the batches are not the cause: the weights give no finite gradient.
_SKIPS_IN_A_ROW = 10
# With a loss scale, steps are also skipped while it is too large. So many halvings lead from its first value to 1/4096.
_OVERFLOWS_IN_A_ROW = 20
# At most this many rollbacks to one checkpoint. PaLM (arXiv:2204.02311, section 5.1) found that a spike does not recur when
# its batches are skipped; one that recurs has another cause.
_ROLLBACKS = 3
# 1 / the normal distribution's 75th percentile: times this, the median absolute deviation estimates the standard deviation
# of normal values (Rousseeuw & Croux, "Alternatives to the median absolute deviation", JASA 88, 1993, section 1).
_NORMAL = 1.4826
# Lower bound of the deviation, as a share of the median: where losses hardly differ, any difference would be a spike.
_LEAST_DEVIATION, _LEAST_LOSS = 1e-3, 1e-3  # of a level; and a level: losses may all be 0


# ------------------------------------------------------------------------------------------------- the steps since a reading


class StepRecord(NamedTuple):
    """One step's numbers, on the host."""

    number: int
    first_sample: int  # of its global batch, counted over the whole run
    loss: float | None  # None: no token was a label
    norm: float  # of the gradient, before clipping
    further: float | None = None  # the mean loss of the MTP modules; 0 without them


class Steps:
    """The steps since the last reading. Their numbers stay on the device until `read`."""

    def __init__(self, mesh: DeviceMesh):
        self.copies = mesh["tp"].size()  # ranks that hold the same share of the loss
        self.waiting: list[tuple[int, int, StepLoss, Tensor]] = []

    def add(self, number: int, first_sample: int, loss: StepLoss, norm: Tensor) -> None:
        """norm: of the gradient, () float32. No host sync."""
        self.waiting.append((number, first_sample, loss, norm))

    def read(self) -> list[StepRecord]:
        """All steps since the last reading, in order: one all-reduce and one transfer. Every rank gets the same numbers.

        A float32 sum depends on the order of the ranks, and a collective chooses that order by the position in the vector, so
        a loss would depend on how often it is reported. A float64 sum, rounded to float32, does not.
        """
        if not self.waiting:
            return []
        numbers, samples, found, norms = zip(*self.waiting, strict=True)
        self.waiting = []
        losses = torch.stack([torch.stack([each.share, each.further]) for each in found], dim=1).double()  # (2, steps)
        dist.all_reduce(losses)
        labels = [torch.ones_like(each.share) if each.labels is None else each.labels for each in found]
        # cpu_offload has the norms on the CPU
        values = [*(losses / self.copies).float(), torch.stack(labels), torch.stack(norms).to(losses.device)]
        rows = zip(numbers, samples, *torch.stack(values).tolist(), strict=True)
        return [
            StepRecord(number, sample, loss if known else None, norm, further if known else None)
            for number, sample, loss, further, known, norm in rows
        ]


# ------------------------------------------------------------------------------------------------------- nonfinite steps


class Decision(NamedTuple):
    """What to do about the steps of one reading."""

    # under "skip" all of them, else the first, which may have caused the later ones; "stop" is about the last
    bad: list[StepRecord]
    action: str  # "": none was bad; "stop", "skip" or "rollback"
    reason: str  # why the run stops, unless `training.on_nonfinite` is the reason
    streak: int  # steps in a row that were not finite, up to the last one


def is_bad(step: StepRecord, scaled: bool) -> bool:
    """Whether a step is an incident. scaled: float16 with a loss scale, where gradients overflow now and then."""
    return (step.loss is not None and not math.isfinite(step.loss)) or not (scaled or math.isfinite(step.norm))


def decide(
    steps: list[StepRecord], policy: str, scale: float | None, streak: int, newest: int | None, rollbacks: int
) -> Decision:
    """What to do about the bad steps among `steps`.

    policy: training.on_nonfinite. scale: the loss scale after the steps, None without one. streak: steps in a row before these
    that were not finite. newest: the step of the newest checkpoint, None where there is none. rollbacks: how often the run has
    gone back to it.

    Later bad steps matter under "skip" only. The target of a rollback therefore does not depend on how many steps are read at
    once, a number that differs in a resumed run. With a loss scale, steps are skipped under every policy: the loss may stay
    finite while no gradient is.
    """
    most = _OVERFLOWS_IN_A_ROW if scale is not None else _SKIPS_IN_A_ROW if policy == "skip" else math.inf
    last = next((step for step in reversed(steps) if is_bad(step, scaled=False)), None)  # after which the scale is known
    bad, reason = list[StepRecord](), ""
    for step in steps:
        streak = streak + 1 if is_bad(step, scaled=False) else 0
        if streak > most:
            reason = f"{streak} steps in a row were not finite, so the weights are the cause, not the batches"
        elif step is last and scale is not None and scale < LEAST:
            reason = f"gradients overflow with a loss scale of {scale:g}, below float16's normal range"
        if reason:  # skipping does not help
            reason += "; checkpoint.load_step goes back to earlier weights"
            if scale is not None:
                reason += ', and training.mixed_precision_param = "bfloat16" or "float32" has the range that float16 lacks'
            return Decision([*bad, step], "stop", reason, streak)
        if is_bad(step, scale is not None):
            bad.append(step)
            if policy != "skip":
                break
    if not bad:
        return Decision(bad, "", "", streak)
    if policy == "rollback" and newest is None:
        reason = "there is no checkpoint yet to go back to"
    elif policy == "rollback" and rollbacks >= _ROLLBACKS:
        reason = f"the run has gone back to step {newest} {rollbacks} times without success"
    return Decision(bad, "stop" if reason else policy, reason, streak)


# ------------------------------------------------------------------------------------------------------------------- spikes


class Spikes:
    """Finds losses far above the median of the losses before them. Its window is empty at every start of the run."""

    def __init__(self, window: int, threshold: float):
        """window: how many losses the median is over; 0: no detection. threshold: standard deviations that make a spike."""
        self.window, self.threshold = window, threshold
        self.losses: deque[float] = deque(maxlen=window)
        self.row: list[float] = []  # the latest consecutive spikes

    def find(self, steps: list[StepRecord]) -> list[tuple[StepRecord, str]]:
        """The spikes among the next steps, each with a phrase for its height."""
        found = []
        for step in steps:
            if self.window == 0 or step.loss is None or not math.isfinite(step.loss):
                continue
            if phrase := self._judge(step.loss):
                found.append((step, phrase))
                self.row.append(step.loss)
            else:
                self.losses.append(step.loss)
                self.row = []
            if 2 * len(self.row) > self.window:  # no spike: the loss has moved to another level
                self.losses = deque(self.row, maxlen=self.window)
                self.row = []
        return found

    def _judge(self, loss: float) -> str:
        if not self.losses or 2 * len(self.losses) < self.window:
            return ""
        middle = statistics.median(self.losses)
        spread = _NORMAL * statistics.median(abs(other - middle) for other in self.losses)
        height = (loss - middle) / max(spread, _LEAST_DEVIATION * max(abs(middle), _LEAST_LOSS))
        return f"{height:.0f} deviations above {middle:.4f}, the median before" if height > self.threshold else ""


# -------------------------------------------------------------------------------------------------------- the file's entries


def rollbacks(entries: Iterable[dict[str, Any]]) -> list[Rollback]:
    """The rollbacks among the incidents of a run, oldest first, without those that a later start has repeated."""
    counting = (entry for entry in entries if entry["kind"] == "rollback" and not entry["superseded"])
    return [Rollback(*(entry[name] for name in Rollback._fields)) for entry in counting]


def faults(config: Config) -> None:
    """Raises UserError for reports or incidents of earlier starts that cannot be read; a run continues their files."""
    folder = Path(config.job.dump_folder)
    read_reports(folder / METRICS)
    read_entries(folder / INCIDENTS)


# ------------------------------------------------------------------------------------------------------------- the whole run


class Incidents:
    """Judges the steps of a run at every reading, decides what to do, and keeps incidents.jsonl.

    All ranks make the same calls; one writes. Entries of steps that a start repeats (after a failure, or with load_step) are
    kept and marked as superseded.
    """

    def __init__(self, config: Config, global_batch: int, first_step: int, active: bool):
        """first_step: the first step of this start; active: whether this rank writes.

        Raises UserError for an incidents.jsonl that cannot be read.
        """
        self.folder, self.policy = Path(config.job.dump_folder), config.training.on_nonfinite
        self.scaled = config.training.mixed_precision_param == "float16"
        self.global_batch, self.active = global_batch, active
        self.spikes = Spikes(config.metrics.spike_window, config.metrics.spike_threshold)
        self.streak, self.rollbacks, self.last_target = 0, 0, -1
        self.entries = read_entries(self.folder / INCIDENTS) if active else []
        for entry in self.entries:
            # a rollback is repeated with the step after the one that it went back to
            repeated = entry["to_step"] + 1 if entry["kind"] == "rollback" else entry["step"]
            entry["superseded"] |= repeated >= first_step
        if self.entries:
            self._save([])

    def are_bad(self, steps: list[StepRecord]) -> bool:
        """Whether one of these steps is not finite, so that `judge` may end the run or roll back."""
        return any(is_bad(step, self.scaled) for step in steps)

    def judge(self, steps: list[StepRecord], newest: int | None, scale: float | None = None) -> StepRecord | None:
        """Reports the incidents of one reading; returns the bad step before which the run must go back, or None to continue.

        newest: the step of this run's newest checkpoint, None where there is none. scale: the loss scale after the steps.
        Raises UserError where the run ends.
        """
        rollbacks = self.rollbacks if newest == self.last_target else 0
        decision = decide(steps, self.policy, scale, self.streak, newest, rollbacks)
        self.streak = decision.streak
        spikes = self.spikes.find(steps)
        if not decision.bad and not spikes:
            return None
        entries = [self._entry("spike", step, "reported", f"a spike, {height}") for step, height in spikes]
        entries += [self._entry("nonfinite", step, *self._action_on(decision, step)) for step in decision.bad]
        entries.sort(key=lambda entry: entry["step"])
        self._save(entries)
        for entry in entries:
            if entry["action"] not in ("stop", "rollback"):  # these two are reported below
                self._log(entry)
        if decision.action == "stop":
            step = decision.bad[-1]
            why = decision.reason or (
                'training.on_nonfinite = "stop" ends the run; "skip" continues without the batch, "rollback" from the '
                "newest checkpoint with the batch after it"
            )
            raise UserError(f"{self._text(step)}: training has diverged; {why}. {self._hint(step.number)}")
        return decision.bad[0] if decision.action == "rollback" else None

    def record_rollback(self, bad: StepRecord, found_at: int, to_step: int) -> Rollback:
        """Records a rollback from step `found_at` to the checkpoint of step `to_step`: the batch after the bad one is next."""
        self.rollbacks = self.rollbacks + 1 if to_step == self.last_target else 1
        self.last_target, self.streak = to_step, 0
        rollback = Rollback(found_at, to_step, bad.first_sample + self.global_batch)
        entry = self._entry("rollback", bad, "rollback", f"rolled back to step {to_step}; the batch is skipped")
        self._log(entry)
        self._save([entry | rollback._asdict()])
        return rollback

    def _action_on(self, decision: Decision, step: StepRecord) -> tuple[str, str]:
        """(action, phrase) of a bad step."""
        if self.policy != "skip":
            return decision.action, "the run stops" if decision.action == "stop" else "the run rolls back"
        if math.isfinite(step.norm):
            return "taken", "taken, since its gradient is finite"
        return "skipped", "skipped"

    def _entry(self, kind: str, step: StepRecord, action: str, phrase: str) -> dict[str, Any]:
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "kind": kind,
            "step": step.number,
            "attempt": self._attempt(step.number),
            "loss": finite(step.loss),  # JSON has no infinity; the text has it
            "grad_norm": finite(step.norm),
            "samples": [step.first_sample, step.first_sample + self.global_batch],  # exclusive end
            "action": action,
            "superseded": False,
            "text": f"{self._text(step)}: {phrase}",
        }

    def _attempt(self, step: int) -> int:
        """The number of this attempt at a step, counting from 1; later attempts follow rollbacks."""
        return len(attempts_at(step, rollbacks(self.entries)))

    def _text(self, step: StepRecord) -> str:
        samples = f"samples {step.first_sample} to {step.first_sample + self.global_batch - 1}"
        loss = "n/a" if step.loss is None else f"{step.loss:.4f}"
        return f"step {step.number}: loss {loss}, gradient norm {step.norm:.4f}, {samples}"

    def _log(self, entry: dict[str, Any]) -> None:
        if self.active:
            log.warning("%s. %s", entry["text"], self._hint(entry["step"]))

    def _hint(self, step: int) -> str:
        attempt = f" --attempt {self._attempt(step)}" if self.policy == "rollback" else ""
        return f"To repeat it: titanlite replay {shlex.quote(str(self.folder))} --step {step}{attempt}"

    def _save(self, entries: list[dict[str, Any]]) -> None:
        """Adds entries; the file is replaced atomically."""
        if self.active:
            self.entries += entries
            with tolerated(self.folder / INCIDENTS):  # the next incident writes all of them
                replace_file(self.folder / INCIDENTS, "".join(json.dumps(entry) + "\n" for entry in self.entries))
