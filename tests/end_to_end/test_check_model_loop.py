"""check-model's rows of whole runs name what a resume, a validation or an asynchronous save changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from titanlite.config.schema import Model
from titanlite.verify import whole_runs
from titanlite.verify.whole_runs import AT, STEPS, Runs, TrainingRun, random_faults, run_faults

HERE = "tests.end_to_end.test_check_model_loop"


def on_rank(**words: Any) -> Runs:
    return whole_runs.run_loops(torch.device("cpu"), **words)


def runs_of(pools: dict[int, Pool], name: str, folder: Path) -> Runs:
    words = {"model": Model(name=name, flavor="plain"), "degrees": {"dp_shard": 2}, "folder": folder}
    return pools[2].run(f"{HERE}:on_rank", **words)[0]


def test_a_right_model_has_three_equal_runs_and_random_numbers_of_its_own_on_each_rank(pools, tmp_path):
    runs = runs_of(pools, "tests.tiny_dropout", tmp_path)
    assert run_faults(runs) == random_faults(runs) == []
    assert sorted(runs.plain.reports) == sorted(runs.full.reports) == list(range(1, STEPS + 1))
    assert all("validation_loss" in report for report in runs.full.reports.values())
    assert [len(drawn) for drawn in runs.resumed.drawn] == [STEPS - AT] * 2


def test_state_that_no_checkpoint_holds_is_found_by_the_loss_after_the_resume(pools, tmp_path):
    (fault,) = run_faults(runs_of(pools, "tests.forks.forgetful", tmp_path))
    assert fault.startswith(f"after a resume from step {AT}, the loss of step {AT + 1} is ")
    assert "what the model keeps outside of parameters and buffers" in fault


def whole(drawn: list[list[float]] | None = None, samples: int = 16, step: int = 3, **changes: float) -> TrainingRun:
    reports = {number: {"lr": 0.1, "loss": 2.0, "grad_norm": 1.0} for number in range(1, STEPS + 1)}
    reports[step] |= changes
    return TrainingRun(reports, drawn or [[0.1, 0.2, 0.3, 0.4]], samples)


@pytest.mark.parametrize(
    "resumed, words",
    [
        (whole([[0.3, 0.4]], samples=20), f"the checkpoint of step {STEPS} counts 20 samples"),
        (whole([[0.1, 0.2]]), "forward passes draw other random numbers"),
        (whole([[0.3, 0.4]], lr=0.2), "the learning rate of step 3 is 0.2 instead of 0.1"),
        (whole([[0.3, 0.4]], loss=2.5, grad_norm=3.0), "the loss of step 3 is 2.5 instead of 2.0: its weights"),
        (whole([[0.3, 0.4]], step=2, loss=2.5), None),  # before the resume
    ],
)
def test_the_first_number_that_differs_after_a_resume_is_named(resumed, words):
    faults = run_faults(Runs(whole(), whole(), resumed))
    assert not faults if words is None else words in faults[0]


def test_changes_by_a_validation_or_a_save_are_distinguished_from_a_resume():
    (fault,) = run_faults(Runs(whole(), whole(step=2, loss=2.5), whole(step=2, loss=2.5)))
    assert fault.startswith("where a run validates, and saves in the background, the loss of step 2 is 2.5 instead of 2.0")


def test_ranks_that_draw_equal_random_numbers_are_named():
    runs = Runs(whole([[0.1, 0.2], [0.7, 0.2]]), whole(), whole())
    (fault,) = random_faults(runs)
    assert fault.startswith("rank 0 in forward pass 2 and rank 1 in forward pass 2 draw the same random numbers")
