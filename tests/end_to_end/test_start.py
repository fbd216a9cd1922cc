"""What a command imports before it answers: no torch for a help text or a misspelled key."""

import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models

from tests.waiting import PATIENCE

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
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "TITANLITE_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(commands=commands, modules=modules)],
        cwd=root,
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
