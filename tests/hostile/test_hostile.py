"""Every wrong input that the generators draw is refused in one message that names it, or gives a right run."""

import importlib
import pkgutil
import random
from pathlib import Path

import pytest

import tests.hostile
from tests.hostile.judge import Case, judge

SEED, FEW = 0, 200
_FRAME = {"judge", "test_judge", "test_hostile"}


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
