"""How a command starts: with which interpreter, streams and packages, and without torch for a help text or a misspelled key."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.waiting import PATIENCE

ROOT = str(Path(__file__).parents[2])
RECIPE = "train_configs/llama_debug.toml"
HEAVY = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tensorboard", "transformers")

# Runs commands as `python -m titanlite` does, and prints the exit code of each, and which of some modules there are after it.
RUN = """
import sys
from titanlite.__main__ import main
for words in {commands}:
    sys.argv = ["titanlite", *words]
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    print("outcome", code, *sorted(set({modules}) & set(sys.modules)), file=sys.stderr)
"""


def outcomes(*commands: list[str], folder: Path, modules: tuple[str, ...]) -> list[str]:
    """The exit code of each of some commands of one process, and those of some modules that are imported after it."""
    environment = os.environ | {"PYTHONPATH": ROOT, "TITANLITE_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(commands=commands, modules=modules)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return [line.removeprefix("outcome ") for line in done.stderr.splitlines() if line.startswith("outcome ")]


def test_help_and_misspelled_options_are_answered_and_text_is_tokenized_without_torch(tmp_path):
    (tmp_path / "data.txt").write_text("Some words to read. " * 50)
    Tokenizer(models.WordLevel({"</s>": 0}, unk_token="</s>")).save(str(tmp_path / "tokenizer.json"))
    paths = {"--input": tmp_path / "data.txt", "--output": tmp_path / "tokens", "--tokenizer": tmp_path}
    expected = [
        (["--help"], "0"),
        (["launsh"], "2"),
        (["check", RECIPE, "--help"], "0"),
        (["check", RECIPE, "--training.step", "3"], "2"),
        (["launch", RECIPE, "--training.step", "3"], "2"),
        (["launch", RECIPE, "--help"], "0"),
        (["tokenize", "--help"], "0"),
        (["convert-config", RECIPE], "0"),
        (["tokenize", "--workers", "1", *(str(word) for pair in paths.items() for word in pair)], "0"),
    ]
    assert outcomes(*(words for words, _ in expected), folder=tmp_path, modules=("torch",)) == [code for _, code in expected]


def test_check_imports_nothing_that_only_a_run_needs(tmp_path):
    assert outcomes(["check", RECIPE, "--job.dump_folder", str(tmp_path)], folder=tmp_path, modules=HEAVY) == ["0"]


def python(code: str, *redirections: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder that Python searches first, by a shell that also redirects or closes its streams."""
    command = ["sh", "-c", f'exec "$0" "$@" {" ".join(redirections)}', sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": ROOT}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("package", ["models/__init__.py", "models/mine.py"])
def test_a_folder_models_of_the_users_own_does_not_hide_that_of_titanlite(tmp_path, package):
    (tmp_path / "models").mkdir()
    (tmp_path / package).write_text("")
    found = python("import titanlite, models; print(models.__file__); import models.once", folder=tmp_path)
    assert found.stdout == f"{ROOT}/models/__init__.py\n", found.stderr
    own = tmp_path / package if "__init__" in package else tmp_path / "models"  # without that file it is a folder
    before = f"import sys; sys.path.remove({ROOT!r}); import models; sys.path.append({ROOT!r})"
    refused = python(f"{before}; import titanlite", folder=tmp_path)
    assert f"models is imported from {own}, and titanlite needs its own, {ROOT}/models; rename yours" in refused.stderr


def test_closed_standard_streams_give_their_numbers_to_no_file_of_the_run(tmp_path):
    code = """
import sys
from titanlite import __main__ as program
sys.argv.append("--help")
program.main()
with open("file", "w") as file:
    print("said", file=sys.stderr, flush=True)
    file.write(str(file.fileno() > 2))
"""
    done = python(code, "<&-", ">&-", "2>&-", folder=tmp_path)
    assert (done.returncode, (tmp_path / "file").read_text()) == (0, "True"), done


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_interpreter_that_makes_the_environment_is_not_that_of_the_run(tmp_path):
    """`make PYTHON=python3.11` had trained with the system's Python, which has no PyTorch."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(Path(ROOT) / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed").touch()
    (tmp_path / "run_train.sh").write_text('#!/bin/sh\necho "interpreter: ${PYTHON-none}"\n')
    (tmp_path / "run_train.sh").chmod(0o755)
    command = ["make", "-s", f"PYTHON={sys.executable}", "train"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "interpreter: none\n"
