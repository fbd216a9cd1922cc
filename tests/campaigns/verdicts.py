"""A plugin of pytest, `-p tests.campaigns.verdicts`: each verdict goes into the file of TITANLITE_VERDICTS."""

import json
import os
import re
from pathlib import Path

import pytest

VARIABLE = "TITANLITE_VERDICTS"
_GROUP = re.compile(r"@(ranks|tests/[\w/]+\.py)$")  # which pytest-xdist adds to a name


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # pytest-xdist's controller gets the reports of all workers
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or not report.passed):
        with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
            file.write(json.dumps([_GROUP.sub("", report.nodeid), report.outcome]) + "\n")


def read(path: Path) -> dict[str, str]:
    """test -> "passed", "skipped" or "failed"; the worst of its parts."""
    verdicts: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        name, outcome = json.loads(line)
        verdicts[name] = "failed" if "failed" in (outcome, verdicts.get(name)) else outcome
    return verdicts
