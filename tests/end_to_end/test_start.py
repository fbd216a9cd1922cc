"""What a command imports before it answers: no torch for a help text or a misspelled key."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.waiting import PATIENCE

RECIPE = "train_configs/llama_debug.toml"
HEAVY = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tensorboard", "transformers")

# Runs a command as `python -m titanlite` does, and prints which modules it has imported.
RUN = """
import atexit, sys
from titanlite.__main__ import main
atexit.register(lambda: print("imported", *sorted(set({modules}) & set(sys.modules)), file=sys.stderr))
main()
"""


def imported(*words: str, folder: Path, modules: tuple[str, ...]) -> tuple[int, list[str]]:
    """(exit code, those of some modules that a command has imported)."""
    script = RUN.format(modules=modules)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "TITANLITE_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    label, *names = done.stderr.splitlines()[-1].split()
    assert label == "imported", done.stderr
    return done.returncode, names


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["launsh"], 2),
        (["check", "--help"], 0),
        (["check", RECIPE, "--help"], 0),
        (["check", RECIPE, "--training.step", "3"], 2),
        (["launch", RECIPE, "--training.step", "3"], 2),
        (["launch", RECIPE, "--help"], 0),
        (["tokenize", "--help"], 0),
        (["convert-config", RECIPE], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_misspelled_options_are_answered_without_torch(tmp_path, words, code):
    assert imported(*words, folder=tmp_path, modules=("torch",)) == (code, [])


def test_text_is_tokenized_without_torch(tmp_path):
    (tmp_path / "data.txt").write_text("Some words to read. " * 50)
    Tokenizer(models.WordLevel({"</s>": 0}, unk_token="</s>")).save(str(tmp_path / "tokenizer.json"))
    words = ["--input", tmp_path / "data.txt", "--output", tmp_path / "tokens", "--tokenizer", tmp_path, "--workers", 1]
    assert imported("tokenize", *map(str, words), folder=tmp_path, modules=("torch",)) == (0, [])


def test_check_imports_nothing_that_only_a_run_needs(tmp_path):
    words = ("check", RECIPE, "--job.dump_folder", str(tmp_path))
    assert imported(*words, folder=tmp_path, modules=HEAVY) == (0, [])
