"""Steps that went wrong: losses and gradient norms that are not finite, and losses that jump.

What a step has found out stays on the device until the loop next waits for it, at a report or a checkpoint. Then every step
since the last time is looked at, in order, by all ranks alike; what is wrong goes to the log and, one object a line, to
incidents.jsonl in the run directory. `titanlite replay` does such a step again.
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
from titanlite.errors import UserError
from titanlite.files import replace_file
from titanlite.parallel.mesh import data_degree

log = logging.getLogger(__name__)

FILE = "incidents.jsonl"

# So many steps in a row may be left out. After that it is not the batches: the weights themselves give no finite gradient.
_SKIPS_IN_A_ROW = 10
# So often a run goes back to the same checkpoint. PaLM (arXiv:2204.02311, section 5.1) found that a spike does not come
# again where its batches are left out; one that does has another cause.
_ROLLBACKS = 3
# 1 / the normal distribution's 75th percentile: times this, the median absolute deviation estimates the standard deviation
# of normal values (Rousseeuw & Croux, "Alternatives to the median absolute deviation", JASA 88, 1993, section 1).
_NORMAL = 1.4826
# The deviation is taken to be at least this share of the median. Where losses hardly differ, any difference would be a jump.
_LEAST_DEVIATION = 1e-3


# ------------------------------------------------------------------------------------------------- what a step has found out


class Step(NamedTuple):
    """What is known of a step once it was read."""

    number: int
    first_sample: int  # of its global batch, counted over the whole run
    loss: float
    norm: float  # of the gradient, before clipping


class Steps:
    """The steps since the last reading; their numbers stay on the device until `read`."""

    def __init__(self, mesh: DeviceMesh):
        self.copies = mesh.size() // data_degree(mesh)  # ranks that hold the same share of the loss
        self.waiting: list[tuple[int, int, Tensor, Tensor]] = []

    def add(self, number: int, first_sample: int, share: Tensor, norm: Tensor) -> None:
        """share, norm: () float32, this rank's share of the loss and the gradient's norm. Does not wait for the device."""
        self.waiting.append((number, first_sample, share, norm))

    def read(self) -> list[Step]:
        """All steps since the last reading, in order: one all-reduce and one transfer. Every rank gets the same numbers.

        A sum in float32 depends on the order of the ranks, and a collective's order on where in the vector a number stands:
        a loss would depend on how often it is reported. In float64 the order is lost when the sum is rounded to float32.
        """
        if not self.waiting:
            return []
        numbers, samples, shares, norms = zip(*self.waiting, strict=True)
        self.waiting = []
        losses = torch.stack(shares).double()
        dist.all_reduce(losses)
        losses = (losses / self.copies).float()
        values = torch.stack([losses, torch.stack(norms).to(losses.device)])  # cpu_offload has the norms on the CPU
        return [Step(*step) for step in zip(numbers, samples, *values.tolist(), strict=True)]


def finite(value: float) -> float | None:
    """A number as JSON can hold it: None for infinity and for what is not a number."""
    return value if math.isfinite(value) else None


# ------------------------------------------------------------------------------------------------------- what is not finite


class Decision(NamedTuple):
    """What follows from the steps of one reading."""

    bad: list[Step]  # under "skip" all of them, else the first: those after it may be bad because of it
    action: str  # "": none was bad; "stop", "skip" or "rollback"
    reason: str  # why the run stops, where `training.on_nonfinite` alone does not say it
    streak: int  # bad steps in a row up to the last one


def is_bad(step: Step, scaled: bool) -> bool:
    """Whether a step is an incident. scaled: float16 with its loss scale, where gradients overflow now and then."""
    return not math.isfinite(step.loss) or not (scaled or math.isfinite(step.norm))


def decide(steps: list[Step], policy: str, scaled: bool, streak: int, newest: int | None, rollbacks: int) -> Decision:
    """What to do about the bad ones among some steps.

    policy: training.on_nonfinite. streak: bad steps in a row before these. newest: the step of the newest checkpoint, None
    where there is none. rollbacks: how often the run has gone back to it.

    Only under "skip" do the later ones matter. So where a rollback leads to does not depend on how many steps are read at
    once, which is another number in a run that was resumed.
    """
    longest = 0
    for step in steps:
        streak = streak + 1 if is_bad(step, scaled) else 0
        longest = max(longest, streak)
    bad = [step for step in steps if is_bad(step, scaled)]
    if not bad:
        return Decision(bad, "", "", streak)
    reason = ""
    if policy == "skip" and longest > _SKIPS_IN_A_ROW:
        reason = (
            f"so it was with {longest} steps in a row, and the weights must be at fault, not the batches; "
            "checkpoint.load_step goes back to earlier ones"
        )
    elif policy == "rollback" and newest is None:
        reason = "there is no checkpoint yet to go back to"
    elif policy == "rollback" and rollbacks >= _ROLLBACKS:
        reason = f"the run has gone back to step {newest} {rollbacks} times, and it was no help"
    return Decision(bad if policy == "skip" else bad[:1], "stop" if reason else policy, reason, streak)


# ------------------------------------------------------------------------------------------------------------------- spikes


class Spikes:
    """Finds losses that jump, by the median of those before; what it has seen begins anew with every start of the run."""

    def __init__(self, window: int, threshold: float):
        """window: losses to look back on, 0 for none at all; threshold: how many standard deviations make a spike."""
        self.window, self.threshold = window, threshold
        self.losses: deque[float] = deque(maxlen=window)
        self.row: list[float] = []  # spikes without another step between them, up to now

    def find(self, steps: list[Step]) -> list[tuple[Step, str]]:
        """The spikes among the next steps, each with a phrase that says how high it is."""
        found = []
        for step in steps:
            if self.window == 0 or not math.isfinite(step.loss):
                continue
            if phrase := self._judge(step.loss):
                found.append((step, phrase))
                self.row.append(step.loss)
            else:
                self.losses.append(step.loss)
                self.row = []
            if 2 * len(self.row) > self.window:  # no spike any more: the loss has another level now
                self.losses = deque(self.row, maxlen=self.window)
                self.row = []
        return found

    def _judge(self, loss: float) -> str:
        if not self.losses or 2 * len(self.losses) < self.window:
            return ""
        middle = statistics.median(self.losses)
        spread = _NORMAL * statistics.median(abs(other - middle) for other in self.losses)
        height = (loss - middle) / max(spread, _LEAST_DEVIATION * abs(middle))
        return f"{height:.0f} deviations above {middle:.4f}, the median before" if height > self.threshold else ""


# -------------------------------------------------------------------------------------------------------- the file's entries


class Stretch(NamedTuple):
    """Steps of a run that were done one after the other. A rollback ends one and begins the next."""

    after: int  # the step of the checkpoint that it went on from, or 0
    last: float  # its last step; infinite for the stretch that the run is in, or has ended in
    next_sample: int | None  # the first sample after the rollback; None for the first stretch, which begins like any run


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The lines of an incidents.jsonl, oldest first. Raises UserError for one that is not as this version writes it."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            entry = json.loads(line)
            assert {"kind", "step", "samples", "action", "superseded"} <= entry.keys()
        except (ValueError, AttributeError, AssertionError):
            raise UserError(f"{path}: line {number} cannot be read; remove it, or rename the file") from None
        entries.append(entry)
    return entries


def stretches(entries: Iterable[dict[str, Any]]) -> list[Stretch]:
    """The stretches of a run, oldest first, by the rollbacks among its incidents."""
    found = [Stretch(0, math.inf, None)]
    for entry in entries:
        if entry["kind"] == "rollback" and not entry["superseded"]:
            found[-1] = found[-1]._replace(last=entry["found_at"])
            found.append(Stretch(entry["to_step"], math.inf, entry["next_sample"]))
    return found


def attempts_at(step: int, found: list[Stretch]) -> list[int]:
    """Which of the stretches have done a step, as indices; its first attempt comes first."""
    return [index for index, stretch in enumerate(found) if stretch.after < step <= stretch.last]


def _will_be_done_again(entry: dict[str, Any], first_step: int) -> bool:
    """Whether an entry is of what a run that starts with `first_step` does not build on."""
    if entry["kind"] == "rollback":
        return entry["to_step"] >= first_step - 1
    return entry["step"] >= first_step


def _identity(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What two entries of the same incident have in common; another mesh may round their losses differently."""
    return entry["kind"], entry["step"], tuple(entry["samples"]), entry["action"]


# ----------------------------------------------------------------------------------------------------------- all of a run's


class Rollback(NamedTuple):
    """That a run is to restore its newest checkpoint, and to go on with other samples than the checkpoint's."""

    bad: Step
    found_at: int  # the step that was the last one when it was noticed
    next_sample: int


class Incidents:
    """Looks at the steps of a run at every reading, says what to do, and keeps incidents.jsonl.

    All ranks call it alike; one writes. Entries of steps that a start does again (after a failure, or with load_step) are
    kept and marked as superseded; when the same incident comes again, its new entry replaces the one that was superseded.
    """

    def __init__(self, config: Config, global_batch: int, first_step: int, active: bool):
        """first_step: what this start does first; active: whether this rank writes.

        Raises UserError for an incidents.jsonl that cannot be read.
        """
        self.folder, self.policy = Path(config.job.dump_folder), config.training.on_nonfinite
        self.scaled = config.training.mixed_precision_param == "float16"
        self.global_batch, self.active = global_batch, active
        self.spikes = Spikes(config.metrics.spike_window, config.metrics.spike_threshold)
        self.streak, self.rollbacks, self.last_target = 0, 0, -1
        self.entries = read_entries(self.folder / FILE) if active else []
        again = [entry for entry in self.entries if not entry["superseded"] and _will_be_done_again(entry, first_step)]
        if again:
            for entry in again:
                entry["superseded"] = True
            self._save([])

    def are_bad(self, steps: list[Step]) -> bool:
        """Whether one of these steps is not finite, so that `judge` may end the run or go back."""
        return any(is_bad(step, self.scaled) for step in steps)

    def judge(self, steps: list[Step], newest: int | None) -> Rollback | None:
        """Reports what was wrong with the steps of one reading; -> the rollback to make, or None to go on.

        newest: the step of this run's newest checkpoint, None where there is none. Raises UserError where the run ends.
        """
        rollbacks = self.rollbacks if newest == self.last_target else 0
        decision = decide(steps, self.policy, self.scaled, self.streak, newest, rollbacks)
        self.streak = decision.streak
        spikes = self.spikes.find(steps)
        if not decision.bad and not spikes:
            return None
        entries = [self._entry("spike", step, "reported", f"a spike, {height}") for step, height in spikes]
        entries += [self._entry("nonfinite", step, *self._fate(decision, step)) for step in decision.bad]
        entries.sort(key=lambda entry: entry["step"])
        self._save(entries)
        for entry in entries:
            if entry["action"] not in ("stop", "rollback"):  # what is said of these follows
                self._log(entry)
        if decision.action == "stop":
            step = decision.bad[0]
            why = decision.reason or (
                'training.on_nonfinite = "stop" ends the run; "skip" goes on without the batch, "rollback" goes on from the '
                "newest checkpoint with the batch after it"
            )
            raise UserError(f"{self._text(step)}: training has diverged; {why}. {self._hint(step.number)}")
        if decision.action != "rollback":
            return None
        bad = decision.bad[0]
        return Rollback(bad, steps[-1].number, bad.first_sample + self.global_batch)

    def went_back(self, rollback: Rollback, to_step: int) -> None:
        """Notes that the rollback was made, to a checkpoint of step `to_step`."""
        self.rollbacks = self.rollbacks + 1 if to_step == self.last_target else 1
        self.last_target, self.streak = to_step, 0
        entry = self._entry("rollback", rollback.bad, "rollback", f"back to step {to_step}, without the batch")
        self._log(entry)
        self._save([entry | {"found_at": rollback.found_at, "to_step": to_step, "next_sample": rollback.next_sample}])

    def _fate(self, decision: Decision, step: Step) -> tuple[str, str]:
        """(action, phrase) of a bad step."""
        if self.policy != "skip":
            return decision.action, "the run stops" if decision.action == "stop" else "the run goes back"
        if math.isfinite(step.norm):
            return "taken", "taken, since its gradient is finite"
        return "skipped", "skipped"

    def _entry(self, kind: str, step: Step, action: str, phrase: str) -> dict[str, Any]:
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "kind": kind,
            "step": step.number,
            "attempt": self._attempt(step.number),
            "loss": finite(step.loss),  # JSON has no infinity: the text has it
            "grad_norm": finite(step.norm),
            "samples": [step.first_sample, step.first_sample + self.global_batch],  # the second is not of the batch
            "action": action,
            "superseded": False,
            "text": f"{self._text(step)}: {phrase}",
        }

    def _attempt(self, step: int) -> int:
        """How often the run has come to a step it is at, counting from 1; more than once after rollbacks."""
        return len(attempts_at(step, stretches(self.entries)))

    def _text(self, step: Step) -> str:
        samples = f"samples {step.first_sample} to {step.first_sample + self.global_batch - 1}"
        return f"step {step.number}: loss {step.loss:.4f}, gradient norm {step.norm:.4f}, {samples}"

    def _log(self, entry: dict[str, Any]) -> None:
        if self.active:
            log.warning("%s. %s", entry["text"], self._hint(entry["step"]))

    def _hint(self, step: int) -> str:
        attempt = f" --attempt {self._attempt(step)}" if self.policy == "rollback" else ""
        return f"Again: titanlite replay {shlex.quote(str(self.folder))} --step {step}{attempt}"

    def _save(self, entries: list[dict[str, Any]]) -> None:
        """Adds entries; the file is written anew, whole or not at all."""
        if not self.active:
            return
        new = {_identity(entry) for entry in entries}
        kept = [entry for entry in self.entries if not (entry["superseded"] and _identity(entry) in new)]
        self.entries = kept + entries
        replace_file(self.folder / FILE, "".join(json.dumps(entry) + "\n" for entry in self.entries))
