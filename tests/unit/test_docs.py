"""The pages are correct as far as tests can check: what they name exists, and forks can rely on docs/reference/interface.md."""

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from docs.site import reference
from models import llama3
from models.decoder import Decoder, Limits
from tests import words
from tests.hostile.arguments import run_command
from titanlite.__main__ import COMMANDS
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.loop.own_code import OwnCode
from titanlite.optim import lr_schedule
from titanlite.parallel import mesh
from titanlite.parallel.tensor import STYLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*/README.md"))
PAGES += sorted(ROOT.glob("tests/*/README.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}
EXAMPLES = {"models/mine.py"}  # created by a reader of docs/tutorials/fork.md
FILES = {"metrics.jsonl", "model.safetensors"}  # not keys of sections
REMOVED = {"compile.unit"}  # named in the changelog, and in commands of earlier measurements

PATH = re.compile(r"(?<![\w./-])(?<!--output )(?:titanlite|models|docs|tests|benchmarks|train_configs|\.ci|\.github)/[\w./-]*")
PLACE = re.compile(r"[\w./-]+\.py:\d+")  # a line of a file, at the commit that the page names
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python3? -m ((?:titanlite|benchmarks|tests|docs)[\w.]*)")
COMMAND = re.compile(r"(?:`|^ {4})titanlite ([a-z][\w-]*)", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--([a-z][\w-]*)(?:\.(\w+))?")
KEY = re.compile(rf"`({'|'.join(SECTIONS)})\.(\w+)")

page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def keys_of_examples(text: str) -> set[tuple[str, str]]:
    """(section, key) of the indented TOML examples; those of [[section.sources]] and of tables in a section are left out."""
    keys, section = set(), ""
    for line in text.splitlines():
        if header := re.match(r" {4}\[([\w.]+)\]$", line):
            section = "" if "." in header[1] else header[1]
        elif re.match(r"\S| {4}\[\[", line):
            section = ""
        elif section and (key := re.match(r" {4}(\w+) *=", line)):
            keys.add((section, key[1]))
    return keys


@page
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page.parent / path.replace("\\", "") if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


@page
def test_paths_and_modules_exist(page):
    text = PLACE.sub("", page.read_text(encoding="utf-8"))
    paths = {path.rstrip(".") for path in PATH.findall(text)} - EXAMPLES
    modules = {module.rstrip(".").replace(".", "/") for module in MODULE.findall(text)}
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {m for m in modules if not (ROOT / m).is_dir() and not (ROOT / f"{m}.py").exists()} == set()


@page
def test_commands_options_and_keys_exist(page):
    text = page.read_text(encoding="utf-8")
    assert set(COMMAND.findall(text)) <= set(COMMANDS)
    named = set(KEY.findall(text)) | {(name, key) for name, key in OPTION.findall(text) if key} | keys_of_examples(text)
    unknown = {f"{s}.{key}" for s, key in named if s not in SECTIONS or key not in SECTIONS[s].model_fields}
    assert unknown - FILES - REMOVED == set()


def test_pages_use_the_words_of_the_field():
    private = [word for file in words.PAGES for word in words.found_in(file)]
    assert private == [], "docs/design/words.md says what to write instead"


def test_options_of_titanlites_commands_exist():
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "titanlite").rglob("*.py"))
    lines = [line for page in PAGES for line in re.findall(r"titanlite [a-z][\w-]* [^`\n]*", page.read_text(encoding="utf-8"))]
    options = {name for line in lines for name, key in OPTION.findall(line) if not key} - {"help", "nproc-per-node"}
    assert {name for name in options if f'"--{name}"' not in sources} == set()


def test_runs_on_the_pages_have_options_that_are_read_and_a_schedule_that_fits():
    """CONFIG.toml may be any recipe: a trace of 40 steps was shorter than the warm-up of nearly all."""
    shown = "\n".join(page.read_text(encoding="utf-8") for page in PAGES).replace("\\\n", "")
    runs = re.findall(r"run_train\.sh (\S+\.toml)((?: +--[\w.]+ +[^\s`#]+)*) *(# refused)?", shown)
    assert len(runs) > 30
    for path, options, refused in runs:
        if not refused:
            path = path if path.startswith("train_configs/") else "train_configs/llama_8b.toml"
            config = read_config(ROOT / path, options.replace("$lr", "1e-3").split())
            assert not [*lr_schedule.faults(config)], (path, options)


def test_every_shown_job_of_slurm_has_a_number_of_nodes_that_its_recipe_can_use():
    """16 nodes have 128 ranks, and a batch of 64 sequences with 2 a rank is for 32."""
    shown = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "run_slurm.sh"])
    jobs = re.findall(r"sbatch --nodes=(\d+) run_slurm\.sh (\S+\.toml)", shown)
    assert len(jobs) > 3
    for nodes, path in jobs:
        config = read_config(ROOT / (path if path.startswith("train_configs/") else "train_configs/llama_8b.toml"), [])
        assert not [*mesh.faults(config, 8 * int(nodes))], (nodes, path)


def test_every_recipe_is_in_the_table():
    table = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    assert [file.name for file in (ROOT / "train_configs").glob("*.toml") if f"`{file.name}`" not in table] == []


def test_the_page_of_keys_is_that_of_the_schema():
    current = reference.KEYS_PAGE.read_text(encoding="utf-8") == reference.keys_page()
    assert current, "write it again: .venv/bin/python -m docs.site.reference"
    assert "### optimizer.lr\n" in (page := reference.keys_page()) and "`FLOAT`, from 1e-20 to 1e+09" in page


def test_the_page_of_commands_shows_every_command():
    commands = reference.commands_page()
    assert [name for name in COMMANDS if f"## titanlite {name}\n" not in commands] == []
    assert commands.count("\nusage: ") == len(COMMANDS) and "NGPU " in commands


def test_the_readme_shows_the_layers_that_lint_enforces():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert "    " + " > ".join(layer for layer in layers if layer != "__main__") + "\n" in README


def test_the_readme_shows_every_package():
    folders = {folder.name for folder in (ROOT / "titanlite").iterdir() if (folder / "__init__.py").exists()}
    assert {name for name in folders if f"\n      {name}/ " not in README} == set()


def test_the_hook_for_weights_and_biases_reports_every_step_to_one_run_of_all_starts(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guides" / "tracking.md").read_text(encoding="utf-8")
    (tmp_path / "wandb_hook.py").write_text(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0])
    wandb = mock.MagicMock(run=None)
    wandb.init.side_effect = lambda **_: setattr(wandb, "run", "begun")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    config = Config.model_validate({"hooks": {"modules": ["wandb_hook"]}, "job": {"dump_folder": str(tmp_path)}})
    for step in (7, 9):  # of two starts
        monkeypatch.delitem(sys.modules, "wandb_hook", raising=False)
        hooks, wandb.run = OwnCode(config), None
        hooks.call("after_building", None, config)
        assert wandb.run is None  # replay and verify get this far
        for report in (step, step + 1):
            hooks.call("at_report", report, {"loss": report / 2})
    assert wandb.log.call_args_list == [mock.call({"loss": step / 2}, step=step) for step in (7, 8, 9, 10)]
    first, second = wandb.init.call_args_list
    assert first == second and first.kwargs["resume"] == "allow" and first.kwargs["id"]


def test_the_script_of_a_sweep_ranks_runs_that_have_seen_fewer_tokens_last_and_shows_those_that_diverged(
    tmp_path, monkeypatch, capsys
):
    page = (ROOT / "docs" / "guides" / "tracking.md").read_text(encoding="utf-8")
    lines = {"a": (2.5, 400), "b": (2.25, 400), "diverged": (None, 400), "stopped": (2.125, 200)}
    for name, (loss, tokens) in lines.items():
        (tmp_path / "outputs/sweep" / name).mkdir(parents=True)
        report = json.dumps({"step": tokens // 100, "loss_mean": loss, "tokens_seen": tokens})
        (tmp_path / "outputs/sweep" / name / "metrics.jsonl").write_text(report + "\n")
    (tmp_path / "outputs/sweep/begun").mkdir()
    (tmp_path / "outputs/sweep/log.txt").touch()
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[-1], {})
    found = [(line.split()[-1], line.split()[-2]) for line in capsys.readouterr().out.splitlines()]
    assert found == [("b", "2.2500"), ("a", "2.5000"), ("diverged", "inf"), ("stopped", "2.1250"), ("begun", "inf")]


def test_an_unknown_command_is_refused_with_the_nearest_one_and_all_others(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command("chek", "run.toml")
    found = capsys.readouterr().err
    assert found.startswith("titanlite chek: no such command; did you mean check?\n")
    assert [command for command in COMMANDS if f"\n  {command} " not in found] == []


# --------------------------------------------------------------------------------------------------- what forks rely on


PAGE = (Path(__file__).parents[2] / "docs/reference/interface.md").read_text(encoding="utf-8")
LINES = re.findall(r"^ {4}(\w+)\.(\w+)\((.*)\)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("module", "name", "parameters"), LINES, ids=[name for _, name, _ in LINES])
def test_a_name_that_forks_import_has_the_parameters_of_the_page(module, name, parameters):
    signature = inspect.signature(getattr(importlib.import_module(f"models.{module}"), name))
    plain = [str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values()]
    assert ", ".join(plain) == parameters, "forks rely on it: deprecate the old form for a release, then change the page"


def test_what_titanlite_sets_on_a_users_model_or_optimizer_is_an_attribute_of_decoder_or_has_its_prefix():
    """`model.routers` and `optimizer.ema` were those of a fork and of an own optimizer too; so can be what it only asks for,
    as `module.SPLIT` was."""
    allowed = {*vars(Decoder), *Decoder.__annotations__, "grad_scale", "found_inf"}  # as torch.amp.GradScaler sets the last two
    nodes = [node for path in (ROOT / "titanlite").rglob("*.py") for node in ast.walk(ast.parse(path.read_bytes()))]
    set_here = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    found = {node.attr for node in set_here if ast.unparse(node.value) in ("model", "optimizer", "root")}
    assert {name for name in found - allowed if not name.startswith("titanlite_")} == set() and len(found) > 10
    asked = re.findall(
        r"\b(?:get|has)attr\((?:model|module|optimizer|root), '(\w+)'",
        "\n".join(ast.unparse(node) for node in nodes if isinstance(node, ast.Call)),
    )
    allowed |= {"own_initial", "LIMITS", "Model", "__name__"}  # the first of models/further.py, the others of a family's file
    assert {name for name in {*asked} - allowed if not name.startswith("titanlite_")} == set() and len({*asked}) > 10


def test_the_words_of_the_tables_are_those_of_the_page():
    [styles] = re.findall(r"^- `sharding`: (.*) \(", PAGE, re.MULTILINE)
    [limits] = re.findall(r"^- `LIMITS`: (.*) \(", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", styles)) == set(STYLES)
    assert set(re.findall(r"`(\w+)`", limits)) == set(Limits._fields)


def test_the_parts_of_a_family_on_the_page_are_there():
    [parts] = re.findall(r"## What a family's file has\n\n(.*?)\n\n", PAGE, re.DOTALL)
    names = set(re.findall(r"`([A-Za-z_]+)`", parts))
    lacking = {name for name in names if not hasattr(llama3, name)}
    assert {"Config", "HF", "lr_scale"} < names and lacking == {"LIMITS", "KEEP", "unused_in_hf"}
