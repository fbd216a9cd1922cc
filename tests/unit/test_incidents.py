"""What counts as an incident, the reaction to it, what counts as a spike, and the entries of incidents.jsonl."""

import math
import random
from pathlib import Path

import pytest

from titanlite.config.schema import Config
from titanlite.data.timeline import Rollback
from titanlite.ground.run_files import INCIDENTS, METRICS, read_entries
from titanlite.loop.divergence import Incidents, Spikes, StepRecord, decide, faults, rollbacks
from titanlite.registry.check import found_by

NAN, INF = math.nan, math.inf
BATCH = 8


def good(*numbers: int) -> list[StepRecord]:
    return [StepRecord(n, (n - 1) * BATCH, 3.0 + 0.01 * (n % 7), 1.0) for n in numbers]


def bad(*numbers: int, loss: float = NAN, norm: float = NAN) -> list[StepRecord]:
    return [StepRecord(n, (n - 1) * BATCH, loss, norm) for n in numbers]


def incidents_of(folder: Path, policy: str, first_step: int = 1, **sections) -> Incidents:
    folder.mkdir(exist_ok=True)
    training = {"on_nonfinite": policy, **sections.pop("training", {})}
    values = {"job": {"dump_folder": str(folder)}, "training": training, **sections}
    return Incidents(Config.model_validate(values), BATCH, first_step, active=True)


def entries_of(folder: Path) -> list[tuple]:
    return [(e["kind"], e["step"], e["action"], e["superseded"]) for e in read_entries(folder / INCIDENTS)]


# --------------------------------------------------------------------------------------------------------- not finite


def test_at_most_ten_steps_in_a_row_are_skipped_for_any_reading_interval():
    steps = good(1) + bad(*range(2, 12)) + good(12) + bad(*range(13, 24)) + good(24)
    for cut in range(1, len(steps)):
        first = decide(steps[:cut], "skip", None, 0, None, 0)
        second = decide(steps[cut:], "skip", None, first.streak, None, 0)
        assert len(first.bad) + len(second.bad) == 21
        assert [first.action, second.action].count("stop") == 1
        assert "11 steps in a row" in (first.reason or second.reason) or cut in range(13, 24)
    assert decide(steps[:12], "skip", None, 0, None, 0).action == "skip"


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_with_a_loss_scale_at_most_twenty_overflows_in_a_row_are_skipped_for_any_reading_interval(policy):
    """The losses are finite, so that no step is an incident by itself."""
    steps = good(1) + bad(*range(2, 22), loss=3.0) + good(22) + bad(*range(23, 44), loss=3.0, norm=INF) + good(44)
    for cut in range(1, len(steps)):
        first = decide(steps[:cut], policy, 1.0, 0, 10, 0)
        second = decide(steps[cut:], policy, 1.0, first.streak, 10, 0)
        assert (first.bad + second.bad)[:1] == steps[42:43]
        assert [first.action, second.action] == (["", "stop"] if cut < 43 else ["stop", ""])
        assert "21 steps in a row were not finite" in first.reason or cut < 43
    assert decide(steps[:42], policy, 1.0, 0, 10, 0).action == ""


@pytest.mark.parametrize(("scale", "action"), [(2.0**-14, ""), (2.0**-15, "stop"), (0.0, "stop")])
def test_a_loss_scale_below_the_smallest_normal_number_ends_the_run_at_an_overflow(scale, action):
    steps = good(1, 2) + bad(3, loss=3.0) + good(4)
    decision = decide(steps, "rollback", scale, 0, 2, 0)
    assert (decision.action, decision.bad) == (action, steps[2:3] if action else [])
    assert decide(good(1, 2), "rollback", scale, 0, 2, 0).action == ""


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_loss_scale_that_later_steps_have_used_up_is_not_the_fault_of_an_earlier_one(policy):
    """The scale is that after the last step of a reading, and each of them has halved it."""
    steps = good(1) + bad(2) + good(3) + bad(*range(4, 9), loss=3.0) + good(9)
    decision = decide(steps, policy, 2.0**-15, 0, 1, 0)
    if policy == "skip":
        assert (decision.action, [step.number for step in decision.bad]) == ("stop", [2, 8])
    else:
        assert decision[:3] == decide(steps[:2], policy, 1.0, 0, 1, 0)[:3] == (steps[1:2], policy, "")


def test_skipped_steps_are_distinguished_from_one_with_only_a_nonfinite_loss(tmp_path):
    incidents = incidents_of(tmp_path, "skip")
    assert incidents.judge(good(1) + bad(2, loss=3.0, norm=INF) + bad(3, loss=INF, norm=2.0), None) is None
    assert entries_of(tmp_path) == [("nonfinite", 2, "skipped", False), ("nonfinite", 3, "taken", False)]


def test_a_rollback_skips_the_bad_batch_and_a_newer_checkpoint_resets_the_count(tmp_path):
    incidents = incidents_of(tmp_path, "rollback")
    for attempt in (1, 2, 3):
        step = incidents.judge(good(5, 6) + bad(7) + good(8), 4)
        assert step.number == 7
        assert incidents.record_rollback(step, 8, 4) == Rollback(found_at=8, to_step=4, next_sample=56)
        assert read_entries(tmp_path / INCIDENTS)[-1]["attempt"] == attempt
    incidents.record_rollback(incidents.judge(bad(9), 8), 9, 8)
    assert incidents.judge(bad(9), 8) is not None


# -------------------------------------------------------------------------------------------------------------- starts


def test_a_start_keeps_what_earlier_ones_wrote_and_marks_what_it_repeats(tmp_path):
    incidents_of(tmp_path, "skip").judge(good(1) + bad(2, 6, 9), None)
    resumed = incidents_of(tmp_path, "skip", first_step=6)
    assert entries_of(tmp_path) == [("nonfinite", n, "skipped", n >= 6) for n in (2, 6, 9)]
    resumed.judge(bad(6), None)
    expected = [(2, False), (6, True), (9, True), (6, False)]
    assert entries_of(tmp_path) == [("nonfinite", n, "skipped", superseded) for n, superseded in expected]
    before = (tmp_path / INCIDENTS).read_text()
    incidents_of(tmp_path, "skip", first_step=8)  # it supersedes nothing new
    assert (tmp_path / INCIDENTS).read_text() == before


def test_a_rollback_counts_only_for_a_start_from_a_later_checkpoint(tmp_path):
    incidents = incidents_of(tmp_path, "rollback")
    rollback = incidents.record_rollback(incidents.judge(bad(12), 10), 14, 10)
    assert rollbacks(read_entries(tmp_path / INCIDENTS)) == [rollback]
    for first_step, counts in ((21, True), (12, True), (11, False), (6, False)):
        incidents_of(tmp_path, "rollback", first_step)
        assert ("rollback", 12, "rollback", not counts) in entries_of(tmp_path)
    assert rollbacks(read_entries(tmp_path / INCIDENTS)) == []


@pytest.mark.parametrize("name", [METRICS, INCIDENTS])
def test_reports_and_incidents_that_cannot_be_read_refuse_a_start_and_none_are_no_fault(tmp_path, name):
    config = Config.model_validate({"job": {"dump_folder": str(tmp_path / "run")}})
    assert [*found_by(faults, config)] == []
    (tmp_path / "run").mkdir()
    assert [*found_by(faults, config)] == []
    (tmp_path / "run" / name).write_text("{}\n")
    (fault,) = found_by(faults, config)
    assert fault.startswith(f"{tmp_path / 'run' / name}: line 1: ") and fault.endswith("; remove the line, or rename the file")


# -------------------------------------------------------------------------------------------------------------- spikes


def falling(steps: int, seed: int = 0) -> list[StepRecord]:
    """Losses as in a real run: from 11 down to 3, with noise."""
    noise = random.Random(seed)
    return [StepRecord(n, 0, 3 + 8 * math.exp(-n / 50) + noise.gauss(0, 0.05), 1.0) for n in range(steps)]


def test_a_spike_is_found_and_a_falling_loss_is_none():
    steps = falling(1000)
    assert Spikes(100, 10.0).find(steps) == []
    steps[400] = steps[400]._replace(loss=steps[400].loss + 1.0)
    ((found, phrase),) = Spikes(100, 10.0).find(steps)
    assert found.number == 400
    height = float(phrase.split()[0])
    assert 14 < height < 28  # 1.0 / 0.05 = 20, by an estimate from 100 losses


def test_losses_of_zero_are_a_level_from_which_rounding_is_no_spike():
    """A loss may be exactly 0: of one batch that is learned by heart, or of a student that equals its teacher."""
    steps = [StepRecord(n, 0, 0.0, 0.0) for n in range(100)] + [StepRecord(100, 0, 1e-7, 0.0), StepRecord(101, 0, 0.1, 1.0)]
    assert [step.number for step, _ in Spikes(100, 10.0).find(steps)] == [101]


def test_nonfinite_losses_are_no_spikes_and_not_in_the_window():
    steps = falling(200) + bad(*range(200, 280)) + [StepRecord(300, 0, 9.0, 1.0)]
    assert [step.number for step, _ in Spikes(100, 10.0).find(steps)] == [300]


def test_a_spike_is_recorded_with_its_samples_and_the_run_continues(tmp_path):
    incidents = incidents_of(tmp_path, "stop", metrics={"spike_window": 20})
    assert incidents.judge([*good(*range(1, 21)), StepRecord(21, 160, 9.0, 30.0)], None) is None
    (entry,) = read_entries(tmp_path / INCIDENTS)
    assert [entry[key] for key in ("kind", "step", "loss", "grad_norm", "samples")] == ["spike", 21, 9.0, 30.0, [160, 168]]
    assert "deviations above 3.0300, the median before" in entry["text"]
