"""Every wrong input that the generators draw is refused in one message that names it, or gives a correct run; and the judge
finds each way in which a refusal can be wrong.
"""

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.hostile
from tests.hostile.judge import Case, judge
from titanlite.ground.errors import UserError

_FRAME = {"judge", "test_hostile"}
GENERATORS = [found.name for found in pkgutil.iter_modules(tests.hostile.__path__) if found.name not in _FRAME]


@pytest.mark.parametrize(
    ("generator", "seed"),
    [
        *((name, 0) for name in GENERATORS),
        *(pytest.param("combined", seed, marks=pytest.mark.slow) for seed in (1, 2, 3)),  # they take long
    ],
)
def test_every_wrong_input_is_refused_in_one_message_that_names_it_or_runs_right(generator, seed, tmp_path, capsys):
    cases = list(importlib.import_module(f"tests.hostile.{generator}").cases(seed))
    assert len({case.name for case in cases}) == len(cases) > 0
    found = {}
    for number, case in enumerate(cases):
        print(case.name)  # for the report of one that hangs
        (folder := tmp_path / str(number)).mkdir()
        found[case.name] = judge(case, folder)
    capsys.readouterr()
    assert not {name: faults for name, faults in found.items() if faults}


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
    faults = judge(Case("case", lambda _: action, r"data\.path"), tmp_path)
    assert (not faults) if fault is None else any(fault in each for each in faults), faults


def test_an_input_that_may_be_accepted_must_have_the_right_result(tmp_path: Path) -> None:
    def wrong() -> None:
        raise AssertionError("3 tokens instead of 4")

    assert judge(Case("right", lambda _: lambda: None, "-", right=True), tmp_path) == []
    assert "3 tokens" in judge(Case("wrong", lambda _: wrong, "-", right=True), tmp_path)[0]
