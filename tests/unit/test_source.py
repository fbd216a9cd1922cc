"""The code of a model: its modules, that only changes of behavior count, and the message of a resume."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from models import llama3
from tests.unit.test_resume import DATA, SOURCE, configuration
from titanlite.checkpoint.manifest import Manifest
from titanlite.ground.errors import UserError
from titanlite.loop.resume import Progress, RunIdentity, check_changes, numbers_of
from titanlite.optim.lr_schedule import build_schedule
from titanlite.registry.family import Family
from titanlite.registry.source import changed_modules, edited_file, hash_of, source_of

TEXT = '''
"""What this is."""

import math as m

@property
def scaled(x, *, by: float = 1e-5, **more):
    """Docstring."""
    note = f"{x!r:>{by}} {m.pi:.3f}" "tail"  # a comment
    match x:
        case [first, *_] | {"key": first}: return (lambda: -first)()
    return x ** 2 if (y := by) > 0 else [each for each in more if each is not None]


class A:
    x: int = 3

    async def nothing(self): pass
'''


@pytest.mark.parametrize("text", [TEXT, "no Python at all", "-" * 100_000 + "1"])
def test_if_another_version_made_the_hash_the_texts_decide(text):
    then, now = {"m": {"hash": "of 0.2", "text": text}}, {"m": {"hash": hash_of(text), "text": text}}
    assert changed_modules(then, now) == []
    assert changed_modules({"m": {"hash": "of 0.2", "text": text + "\nx = 1"}}, now) == ["m"]
    assert changed_modules({}, now) == changed_modules(then, {}) == ["m"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """Docstring."""\n', ""),
        ("  # a comment", ""),
        ("*, by: float = 1e-5, **more", "\n    *,\n    by: float = 0.00001,\n    **more,\n"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(old, new):
    assert old in TEXT and hash_of(TEXT.replace(old, new)) == hash_of(TEXT)


@pytest.mark.parametrize(("old", "new"), [("1e-5", "1e-6"), ("** 2", "* 2"), ("!r", "!s"), ("@property\n", "")])
def test_what_a_model_does_counts(old, new):
    assert old in TEXT and hash_of(TEXT.replace(old, new)) != hash_of(TEXT)


# ------------------------------------------------------------------------------------------------------------- modules


FILES = {
    "own/__init__.py": "",
    "own/model.py": "import math\nimport torch\nfrom . import layers\nfrom .parts.norms import EPS\nfrom models import llama3\n"
    "from helpers_of_mine import scale\nimport titanlite.ground.errors\nimport xxhash\n\ndef late():\n    import own.later\n",
    "own/layers.py": "from .parts import norms as again\nSCALE = 1.0\n",
    "own/parts/norms.py": "EPS = 1e-5\n",
    "own/later.py": "raise RuntimeError('nobody imports this while the model is read')\n",
    "own/unused.py": "1\n",
    "helpers_of_mine.py": "from own.parts.norms import EPS as scale\n",
}


@pytest.fixture
def own(tmp_path, monkeypatch) -> Callable[[], ModuleType]:
    """Imports own.model again, as another start does."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        for name in [name for name in sys.modules if re.match(r"own(\.|$)|helpers_of_mine$", name)]:
            del sys.modules[name]

    def start() -> ModuleType:
        forget()
        importlib.invalidate_caches()
        return importlib.import_module("own.model")

    yield start
    forget()


_PARTS = ("attention", "blocks", "decoder", "head", "llama3", "mup", "rope", "split", "torch_private")
ZOO = ["models", *(f"models.{part}" for part in _PARTS)]
MINE = ["helpers_of_mine", "own", "own.later", "own.layers", "own.model", "own.parts.norms"]


def test_the_code_of_a_model_is_everything_that_it_imports_except_libraries(own):
    assert list(source_of(own())) == [*MINE[:1], *ZOO, *MINE[1:]]
    assert "own.later" not in sys.modules  # not imported
    assert list(source_of(llama3)) == ZOO


def test_a_file_that_is_edited_while_a_run_trains_does_not_change_what_the_run_writes(own, tmp_path):
    module = own()
    before = source_of(module)
    (tmp_path / "own/model.py").write_text(FILES["own/model.py"] + "# a comment\n")
    assert edited_file(module) is None
    (tmp_path / "own/layers.py").write_text("SCALE = 2.0\n")
    assert source_of(module) is before
    assert edited_file(module) == str(tmp_path / "own/layers.py")
    assert changed_modules(before, source_of(own())) == ["own.layers"]


# ------------------------------------------------------------------------------------------------------------- resumes


def resume(module: ModuleType, found: Manifest | None, allowed: list[str]) -> Manifest:
    """Continues from a run's checkpoint; -> what the run with this code writes."""
    config = configuration({"checkpoint.allow_changes": allowed})
    run = RunIdentity(config, Family(module, llama3.FLAVORS["debug"]), DATA, 8)
    if found:
        check_changes(run, SOURCE, found)
    numbers = numbers_of(run, build_schedule(config), Progress(10, DATA.timeline(8)))
    return Manifest(json.loads(json.dumps(numbers)), {})


def test_a_changed_model_is_refused_with_its_difference_until_it_is_allowed(own, tmp_path):
    first = resume(own(), None, [])
    resume(own(), first, [])
    (tmp_path / "own/parts/norms.py").write_text("# a comment\nEPS = 1e-5\n")
    resume(own(), first, [])
    (tmp_path / "own/parts/norms.py").write_text("EPS = 1e-6\n")
    with pytest.raises(UserError) as refused:
        resume(own(), first, ["optimizer.lr"])
    lines = ["    -EPS = 1e-5", "    +EPS = 1e-6"]
    assert [line for line in str(refused.value).splitlines() if "EPS" in line] == lines
    assert "--checkpoint.allow_changes optimizer.lr,model.source" in str(refused.value)
    second = resume(own(), first, ["model.source"])
    resume(own(), second, [])
