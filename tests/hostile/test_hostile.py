"""Every wrong input that the generators draw is refused in one message that names it, or gives a correct run; and the judge
finds each way in which a refusal can be wrong.
"""

import importlib
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.hostile
from tests.hostile.judge import Case, judge
from titanlite.ground.errors import UserError

SEED, FEW = 0, 200
_FRAME = {"judge", "test_hostile"}


def every_case() -> list[Case]:
    """The cases of all generators: the function `cases(seed)` of each other module of this folder."""
    modules = [found.name for found in pkgutil.iter_modules(tests.hostile.__path__) if found.name not in _FRAME]
    return [case for name in modules for case in importlib.import_module(f"tests.hostile.{name}").cases(SEED)]


CASES = every_case()
_SPREAD = set(random.Random(SEED).sample(range(len(CASES)), min(FEW, len(CASES))))


def _title(case: Case) -> str:
    return f"{case.mechanism} {case.name}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=_title(case), marks=() if number in _SPREAD else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_is_refused_in_one_message_that_names_it_or_runs_right(case: Case, tmp_path: Path) -> None:
    assert judge(case, tmp_path) == []


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({_title(case) for case in CASES}) == len(CASES)


# --------------------------------------------------------------------------------------------------------------- the judge


def _refuse(text: str = "data.path: missing") -> None:
    raise UserError(text)


def _write_and_refuse() -> None:
    Path("left").write_text("half")
    _refuse()


def _start_and_refuse() -> None:
    subprocess.Popen(["sleep", "3"])
    _refuse()


@pytest.mark.parametrize(
    "action, fault",
    [
        (_refuse, None),
        (lambda: _refuse("something is wrong"), "does not name"),
        (lambda: _refuse("data.path: Traceback (most recent call last)"), "a traceback"),
        (lambda: None, "accepted"),
        (lambda: [][0], "IndexError"),
        (lambda: sys.exit(1), "exit code 1"),
        (_write_and_refuse, "written: left"),
        (_start_and_refuse, "processes are left"),
    ],
)
def test_a_refusal_is_one_message_with_the_name_and_leaves_nothing(
    action: Callable[[], object], fault: str | None, tmp_path: Path
) -> None:
    faults = judge(Case("judge", "case", lambda _: action, r"data\.path"), tmp_path)
    assert (not faults) if fault is None else any(fault in each for each in faults), faults


def test_an_input_that_may_be_accepted_must_have_the_right_result(tmp_path: Path) -> None:
    def wrong() -> None:
        raise AssertionError("3 tokens instead of 4")

    assert judge(Case("judge", "right", lambda _: lambda: None, "-", right=True), tmp_path) == []
    assert "3 tokens" in judge(Case("judge", "wrong", lambda _: wrong, "-", right=True), tmp_path)[0]
