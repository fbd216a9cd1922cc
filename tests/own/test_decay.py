"""A decay of the user's own: its rates, what is refused, its code as part of a run, and a resumed run."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from models import llama3
from tests.distributed.test_resume import ONE, STEPS, reports, resumes_bit_for_bit
from tests.unit.test_resume import DATA, SOURCE
from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.read import read_config, to_toml
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.resume import Progress, RunIdentity, check_changes, numbers_of
from titanlite.optim.lr_schedule import build_schedule, faults
from titanlite.registry.check import found_by
from titanlite.registry.family import Family
from titanlite.registry.own import check_trust, source_of_parts
from titanlite.tools.replay import setting_of

OWN = "tests.own.parts:inverse_sqrt"
KEY = "lr_scheduler.decay_type"


def configured(decay_type: str = OWN, steps: int = 100, **keys) -> Config:
    lr_scheduler = {"warmup_steps": 10, "decay_type": decay_type, **keys}
    return Config.model_validate({"training": {"steps": steps}, "optimizer": {"lr": 0.5}, "lr_scheduler": lr_scheduler})


# ------------------------------------------------------------------------------------------------------------ the rates


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("least", [0.0, 0.25])
def test_the_rates_are_those_of_the_function_and_stay_after_the_end(power, least):
    schedule = build_schedule(configured(min_lr_factor=least, options={"power": power}))
    for step in range(1, 130):
        share = min(step, 10) / 10 if step <= 10 else (10 / min(step, 101 if least == 0 else 100)) ** power
        expected = 0.5 * share if step <= 10 else 0.5 * (least + (1 - least) * share)
        assert schedule.at(step) == pytest.approx(expected, rel=1e-12), step


def test_steps_may_follow_a_decay_that_does_not_end_at_zero():
    longer = configured(steps=150, total_steps=100)
    assert list(faults(longer)) == []
    (fault,) = faults(configured("linear", steps=150, total_steps=100))
    assert "after lr_scheduler.total_steps = 100 the learning rate is 0" in fault


# ------------------------------------------------------------------------------------------------------------ refusals

# The user's module, the part, its options, and the message.
WRONG = {
    "raises at one step": (
        "def f(step, start, end):\n    return 1.0 if step < 50 else 1 / 0\n",
        "f",
        {},
        r"fails at step 50 \(.*line 2\): Zero",
    ),
    "above 1": ("def f(step, start, end):\n    return 2.0\n", "f", {}, "returns 2.0 at step 11; must be .*, line 1"),
    "not a number": ("def f(step, start, end):\n    return float('nan')\n", "f", {}, "returns nan at step 11"),
    "a tensor": ("import torch\ndef f(step, start, end):\n    return torch.ones(2)\n", "f", {}, r"returns tensor\(.*line 2"),
    "nothing": ("def f(step, start, end):\n    pass\n", "f", {}, "returns None at step 11"),
    "not pure": (
        "calls = []\ndef f(step, *_):\n    calls.append(1)\n    return 1 / len(calls)\n",
        "f",
        {},
        "two different values",
    ),
    "other arguments": ("def f(progress):\n    return progress\n", "f", {}, "must take step, start, end.*, line 1"),
    "a class": ("class f:\n    pass\n", "f", {}, "must be a function, and is a class .*wrong_parts.py"),
    "a number": ("f = 3\n", "f", {}, "must be a function, and is a value of type int .*wrong_parts.py"),
    "misspelt": ("def decay(step, start, end):\n    return 1.0\n", "deacy", {}, "has no deacy; did you mean decay"),
    "no module": (None, "f", {}, "there is no module wrong_parts"),
    "import fails": ("1 / 0\n", "f", {}, r"importing wrong_parts failed \(.*wrong_parts.py, line 1\)"),
    "imports what is not there": ("import no_such_library\n", "f", {}, "imports no_such_library, which is not installed"),
    "misspelt option": (
        *("def f(step, start, end, power=2.0):\n    return 1.0\n", "f", {"powr": 1.0}),
        r"^lr_scheduler\.options\.powr: .* no such option; did you mean lr_scheduler\.options\.power\?",
    ),
    "option of another type": (
        *("def f(step, start, end, power: float = 2.0):\n    return 1.0\n", "f", {"power": "high"}),
        r"^lr_scheduler\.options\.power = 'high': must be a valid number",
    ),
    "missing option": (
        *("def f(step, start, end, *, power):\n    return 1.0\n", "f", {}),
        "must take step, start, end, then lr_scheduler.options by keyword: missing a required .*'power'.*, line 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_gets_one_message_with_its_key_and_line(name, tmp_path, monkeypatch):
    text, part, options, words = WRONG[name]
    if text is not None:
        (tmp_path / "wrong_parts.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrong_parts", raising=False)
    (fault,) = found_by(faults, configured(f"wrong_parts:{part}", options=options))
    monkeypatch.delitem(sys.modules, "wrong_parts", raising=False)
    assert fault.startswith("lr_scheduler.")
    with pytest.raises(UserError, match=words):
        raise UserError(fault)


@pytest.mark.parametrize("name", ["own:", ":f", "my-parts:f", "a.b", "a:b.c", "a:b:c", "a..b:c", "1a:b"])
def test_an_invalid_name_of_a_part_is_refused_with_what_is_allowed(name):
    with pytest.raises(UserError, match=r"""must be 'linear', 'sqrt' or 'cosine' or "package.module:name", a part"""):
        read_config(None, [f"--{KEY}", name])


def test_options_without_an_own_decay_are_refused_and_a_written_configuration_reads_back(tmp_path):
    config = read_config(None, [f"--{KEY}", OWN, "--lr_scheduler.options.power", "0.25"])
    assert config.lr_scheduler.options == {"power": 0.25}
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert read_config(tmp_path / "config.toml", []) == config


# ------------------------------------------------------------------------------------------------------ code of the run


def test_no_part_that_a_run_names_is_imported_unless_the_command_names_it(tmp_path, monkeypatch):
    (tmp_path / "foreign_part.py").write_text("raise SystemExit('was run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured("foreign_part:f")
    with pytest.raises(UserError, match=r"no code that a file names is run; .* --own foreign_part:f"):
        check_trust(config, Path("run"), ["another:f"])
    check_trust(config, Path("run"), ["foreign_part:f"])
    with pytest.raises(UserError, match="--own another:f: run names no such part"):
        check_trust(config, Path("run"), ["foreign_part:f", "another:f"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    with pytest.raises(UserError, match="--own foreign_part:f"):
        setting_of(tmp_path, 1)
    assert "foreign_part" not in sys.modules


def test_the_source_of_a_part_is_its_module_and_what_it_imports(tmp_path, monkeypatch):
    (tmp_path / "part_of_mine.py").write_text("import math\nimport help_of_mine\ndef f(step, start, end): return 1.0\n")
    (tmp_path / "help_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(source_of_parts(configured("part_of_mine:f"))) == ["help_of_mine", "part_of_mine"]
    assert source_of_parts(configured("cosine")) == {}


def test_a_resume_with_other_code_of_a_part_is_refused_with_its_difference(tmp_path, monkeypatch):
    file = tmp_path / "changing_part_of_mine.py"
    file.write_text("def f(step, start, end): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured("changing_part_of_mine:f")
    identity = RunIdentity(config, Family(llama3, llama3.FLAVORS["debug"]), DATA, 8)
    numbers = json.loads(json.dumps(numbers_of(identity, build_schedule(config), Progress(10, DATA.timeline(8)))))
    check_changes(identity, SOURCE, Manifest(numbers, {}))
    file.write_text("def f(step, start, end): return 0.5 * 1.0\n")
    monkeypatch.delitem(sys.modules, "changing_part_of_mine")
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"(?s)-def f.* return 1\.0.*\+def f.*--checkpoint.allow_changes model.source"):
        check_changes(identity, SOURCE, Manifest(numbers, {}))
    monkeypatch.delitem(sys.modules, "changing_part_of_mine")


# -------------------------------------------------------------------------------------- a run; test_together.py has meshes

KEYS = {"decay_type": OWN, "warmup_steps": 2, "options": {"power": 1.0}}


def test_a_resumed_run_is_the_uninterrupted_one_and_keeps_the_code(pools, tmp_path):
    keys = {"lr_scheduler": {"total_steps": STEPS, **KEYS}}
    resumes_bit_for_bit(pools, ONE, tmp_path, **keys)
    rates = [report["lr"] for report in reports(tmp_path / "whole")]
    assert rates == pytest.approx([5e-3 * share for share in (0.5, 1.0, *(2 / step for step in range(3, STEPS + 1)))])
    saved = manifest.read(tmp_path / "parts" / f"checkpoint/step-{STEPS:08d}")
    assert "return (max(1, start) / step) ** power" in saved.numbers["own_source"]["tests.own.parts"]["text"]
    (start, *_) = json.loads((tmp_path / "parts/provenance.json").read_text())
    assert start["own_source"] == saved.numbers["own_source"]
