"""What forks rely on is what docs/interface.md says: a change to it is a decision, with a release of deprecation before it."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from models import llama3
from models.decoder import Limits
from titanlite.parallel.tensor import STYLES

PAGE = (Path(__file__).parents[2] / "docs/interface.md").read_text(encoding="utf-8")
LINES = re.findall(r"^ {4}(\w+)\.(\w+)\((.*)\)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("module", "name", "parameters"), LINES, ids=[name for _, name, _ in LINES])
def test_a_name_that_forks_import_has_the_parameters_of_the_page(module, name, parameters):
    signature = inspect.signature(getattr(importlib.import_module(f"models.{module}"), name))
    plain = [str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values()]
    assert ", ".join(plain) == parameters, "forks rely on it: deprecate the old form for a release, then change the page"


def test_the_words_of_the_tables_are_those_of_the_page():
    [styles] = re.findall(r"^- `sharding`: (.*) \(", PAGE, re.MULTILINE)
    [limits] = re.findall(r"^- `LIMITS`: (.*) \(", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", styles)) == set(STYLES)
    assert set(re.findall(r"`(\w+)`", limits)) == set(Limits._fields)


def test_the_parts_of_a_family_on_the_page_are_there():
    [parts] = re.findall(r"## What a family's file has\n\n(.*?)\n\n", PAGE, re.DOTALL)
    names = set(re.findall(r"`([A-Za-z_]+)`", parts)) - {"LIMITS", "KEEP"}
    assert {"Config", "HF"} < names and [name for name in names if not hasattr(llama3, name)] == []
