"""A decay of the user's own: its rates, what is refused, and its code as part of a run; test_together.py has runs."""

import json
import sys
from pathlib import Path

import pytest

from models import llama3
from tests.unit.test_resume import DATA, SOURCE
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.read import read_config, to_toml
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.own_code import OwnCode
from titanlite.loop.resume import Progress, RunIdentity, check_changes, numbers_of
from titanlite.optim.lr_schedule import build_schedule, faults
from titanlite.registry.check import found_by
from titanlite.registry.family import Family
from titanlite.registry.own import parts_of, source_of_parts
from titanlite.tools.replay import check_trust, setting_of

OWN = "tests.own.parts:inverse_sqrt"
KEY = "lr_scheduler.decay_type"


def configured(decay_type: str = OWN, steps: int = 100, **keys) -> Config:
    lr_scheduler = {"warmup_steps": 10, "decay_type": decay_type, **keys}
    return Config.model_validate({"training": {"steps": steps}, "optimizer": {"lr": 0.5}, "lr_scheduler": lr_scheduler})


# ------------------------------------------------------------------------------------------------------------ the rates


@pytest.mark.parametrize(("power", "least"), [(0.5, 0.0), (1.0, 0.25)])
def test_the_rates_are_those_of_the_function_and_stay_after_the_end(power, least):
    schedule = build_schedule(configured(min_lr_factor=least, options={"power": power}))
    for step in range(1, 130):
        share = min(step, 10) / 10 if step <= 10 else (10 / min(step, 101 if least == 0 else 100)) ** power
        expected = 0.5 * share if step <= 10 else 0.5 * (least + (1 - least) * share)
        assert schedule.at(step) == pytest.approx(expected, rel=1e-12), step


def test_steps_may_follow_a_decay_that_does_not_end_at_zero_and_a_run_may_end_with_its_warm_up():
    assert list(faults(configured(steps=10))) == list(faults(configured(decay_ratio=0.0))) == []
    longer = configured(steps=150, total_steps=100)
    assert list(faults(longer)) == []
    (fault,) = faults(configured("linear", steps=150, total_steps=100))
    assert "after lr_scheduler.total_steps = 100 the learning rate is 0" in fault


# ------------------------------------------------------------------------------------------------------------ refusals

F = "def f(step, start, end):\n    return "
# The user's module, its options, and the message.
WRONG = {
    "raises at one step": (F + "1.0 if step < 50 else 1 / 0\n", {}, r"fails at step 50 \(.*line 2\): Zero"),
    "above 1": (F + "2.0\n", {}, "returns 2.0 at step 11; must be .*, line 1"),
    "not a number": (F + "float('nan')\n", {}, "returns nan at step 11"),
    "a tensor": (f"import torch\n{F}torch.ones(2)\n", {}, r"returns tensor\(.*line 2"),
    "not pure": ("n = []\ndef f(step, *_):\n    n.append(1)\n    return 1 / len(n)\n", {}, "two different values"),
    "other arguments": ("def f(progress):\n    return progress\n", {}, "must take step, start, end.*, line 1"),
    "a class": ("class f:\n    pass\n", {}, "must be a function, and is a class .*own_code.py"),
    "another name": ("def g(step, start, end):\n    return 1.0\n", {}, "has no f"),
    "no module": (None, {}, "there is no module own_code"),
    "import fails": ("1 / 0\n", {}, r"importing own_code failed \(.*own_code.py, line 1\)"),
    "imports what is not there": ("import no_such_library\n", {}, "imports no_such_library, which is not installed"),
    "misspelt option": (
        *("def f(step, start, end, power=2.0):\n    return 1.0\n", {"powr": 1.0}),
        r"^lr_scheduler\.options\.powr: .* no such option; did you mean lr_scheduler\.options\.power\?",
    ),
    "option of another type": (
        *("def f(step, start, end, power: float = 2.0):\n    return 1.0\n", {"power": "high"}),
        r"^lr_scheduler\.options\.power = 'high': must be a valid number",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_gets_one_message_with_its_key_and_line(name, own_module):
    text, options, words = WRONG[name]
    if text is not None:
        own_module(text)
    (fault,) = found_by(faults, configured("own_code:f", options=options))
    assert fault.startswith("lr_scheduler.")
    with pytest.raises(UserError, match=words):
        raise UserError(fault)


@pytest.mark.parametrize("name", ["own:", "my-parts:f", "a:b.c"])
def test_an_invalid_name_of_a_part_is_refused_with_what_is_allowed(name):
    with pytest.raises(UserError, match=r"""must be 'linear', 'sqrt' or 'cosine' or "package.module:name", a part"""):
        read_config(None, [f"--{KEY}", name])


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


def test_what_only_reports_is_left_out_of_a_replay_and_never_imported(tmp_path, monkeypatch):
    (tmp_path / "foreign_report.py").write_text("raise SystemExit('was run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    part = "foreign_report:f"
    sections = {
        "metrics": {"extra": [part]},
        "validation": {"enable": True, "dataset": part},
        "training": {"global_batch_size": 8},
    }
    (tmp_path / "config.toml").write_text(to_toml(Config.model_validate(sections)))
    config, _ = setting_of(tmp_path, 1)
    OwnCode(config)
    assert source_of_parts(config, reports=True) == parts_of(config) == {} and "foreign_report" not in sys.modules


def test_the_source_of_a_part_is_its_module_and_what_it_imports(tmp_path, monkeypatch):
    (tmp_path / "part_of_mine.py").write_text("import math\nimport help_of_mine\ndef f(step, start, end): return 1.0\n")
    (tmp_path / "help_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(source_of_parts(configured("part_of_mine:f"))) == ["help_of_mine", "part_of_mine"]
    assert source_of_parts(configured("cosine")) == {}


def test_a_resume_with_other_code_of_a_part_is_refused_with_its_difference(own_module):
    own_module("def f(step, start, end): return 1.0\n")
    identity, numbers = saved_by(configured("own_code:f"))
    check_changes(identity, SOURCE, Manifest(numbers, {}))
    own_module("def f(step, start, end): return 0.5 * 1.0\n")
    with pytest.raises(UserError, match=r"(?s)-def f.* return 1\.0.*\+def f.*--checkpoint.allow_changes model.source"):
        check_changes(identity, SOURCE, Manifest(numbers, {}))


def saved_by(config: Config) -> tuple[RunIdentity, dict]:
    """The identity of a run, and the numbers of its checkpoint of step 10."""
    identity = RunIdentity(config, Family(llama3, llama3.FLAVORS["debug"]), DATA, 8)
    return identity, json.loads(json.dumps(numbers_of(identity, build_schedule(config), Progress(10, DATA.timeline(8)))))


def test_a_hook_that_a_resume_adds_is_one_change_which_its_key_allows(own_module):
    own_module("def after_step(step, model, optimizer): pass\n")
    identity, numbers = saved_by(configured("cosine"))
    with_hook = identity.config.with_keys({"hooks.modules": ["own_code"]})
    with pytest.raises(UserError, match=r"--checkpoint\.allow_changes hooks\.modules$"):
        check_changes(identity._replace(config=with_hook), SOURCE, Manifest(numbers, {}))
    allowed = with_hook.with_keys({"checkpoint.allow_changes": ["hooks.modules"]})
    check_changes(identity._replace(config=allowed), SOURCE, Manifest(numbers, {}))


def test_code_that_only_reports_is_not_stored_for_a_resume_to_compare(own_module):
    own_module("class Held: pass\n")
    config = configured("cosine").with_keys({"validation.enable": True, "validation.dataset": "own_code:Held"})
    assert saved_by(config)[1]["own_source"] == {}


def test_a_schedule_that_ends_with_the_warm_up_is_not_continued_at_the_full_rate():
    identity, numbers = saved_by(configured(steps=10))
    with pytest.raises(UserError, match=r"ends at step 10, before its decay\. To stretch it: --lr_scheduler\.total_steps 100 "):
        check_changes(identity._replace(config=configured(steps=100)), SOURCE, Manifest(numbers, {}))
