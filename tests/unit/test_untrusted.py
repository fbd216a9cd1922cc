"""One reader for files from outside: nothing else opens them; and no name in a file is imported."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import untrusted_files
from tests.token_files import data_of
from titanlite.__main__ import main
from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.folder import step_folder
from titanlite.config.read import to_toml
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.resume import RunIdentity, load_run
from titanlite.registry.family import family_of
from titanlite.tools.open_model import open_model

ROOT = Path(__file__).parents[2]
# Calls that open a file for reading, or run its contents. A mode of "w", "a" or "x" writes.
_OPENS = {
    "open", "read_text", "read_bytes", "loads", "load", "safe_open", "memmap", "fromfile", "from_file", "from_pretrained",
    "import_module", "Unpickler", "FileSystemReader", "ParquetFile", "load_from_disk", "load_dataset_builder",
}  # fmt: skip
# Functions that may, and why.
ALLOWED = {
    "ground/untrusted.py": {"open": "the reader", "loads": "the reader"},
    "ground/files.py": {"open": "to sync it, or to see whether it is still there"},
    "config/effects.py": {"loads": "text of the schema"},
    "registry/family.py": {
        "loads": "text that it has just made",
        "read_bytes": "code of models/",
        "import_module": "the user's own word: see `trusted`",
    },
    "registry/source.py": {"read_bytes": "code that was imported"},
    "checkpoint/storage.py": {"load": "an unpickler that admits few classes"},
    "checkpoint/load.py": {"load": "tensors of a verified checkpoint"},
    "checkpoint/folder.py": {"read_text": "what this run has just written"},
    "hf/folder.py": {"safe_open": "after `size_of`; it validates the header"},
    "hf/entries.py": {"safe_open": "files that hf/folder.py has validated"},
    "data/own.py": {"loads": "text that it has just made"},
    "loop/resume.py": {"loads": "what the other ranks of the run have sent"},
    "data/packing.py": {"load": "after `size_of`, without pickles"},
    "data/prepare/encode.py": {"open": "/dev/null, to write"},
    "data/prepare/sums.py": {"open": "a file that this process has just written"},
    "data/prepare/open_files.py": {"open": "URLs, by fsspec", "import_module": "names of this file's callers"},
    "data/prepare/readers.py": {
        "ParquetFile": "an opened file",
        "load_from_disk": "a folder that the user names",
        "load_dataset_builder": "a data set that the user names; the package runs no code of it",
    },
    "data/prepare/documents.py": {"ParquetFile": "an opened file"},
    "launch/agreement.py": {"read_bytes": "titanlite's own code", "loads": "what the other ranks of the run have sent"},
    "launch/run_folder.py": {"open": "the lock"},
    "launch/layout.py": {"read_text": "a file of the kernel"},
    "launch/fork_server.py": {"import_module": "names of its callers"},
    "loop/memory.py": {"read_text": "a file of the kernel"},
    "verify/facts.py": {"loads": "text that it has just made"},
    "launch/local_ranks.py": {"load": "what a rank has just written", "read_text": "what a rank has just written"},
    "__main__.py": {"import_module": "the command", "open": "/dev/null"},
}


def _opening_calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in ("read_text", "read_bytes", "load") and isinstance(function, ast.Name):
                continue  # the reader itself; a function of its own file
            if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "untrusted":
                continue
            modes = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            writes = name == "open" and any(mode[:1] in ("w", "a", "x") and "+" not in mode for mode in modes)
            if name in _OPENS and not writes:
                yield name


def test_no_other_place_opens_a_file_from_outside():
    found = {
        path.relative_to(ROOT / "titanlite").as_posix(): set(_opening_calls(ast.parse(path.read_text(encoding="utf-8"))))
        for path in (ROOT / "titanlite").rglob("*.py")
    }
    others = {path: names - ALLOWED.get(path, {}).keys() for path, names in found.items()}
    assert {path: names for path, names in others.items() if names} == {}, (
        "read it with titanlite/ground/untrusted.py, or say why not"
    )
    assert {path for path, names in ALLOWED.items() if names.keys() - found[path]} == set(), "no longer needed"


# --------------------------------------------------------------------------------------------- no name from a file is imported


@pytest.fixture
def forged(tmp_path, monkeypatch) -> Path:
    """A run whose configuration and checkpoint name a module of the working folder, which leaves a trace when imported."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text("open('imported', 'w')\n")
    (tmp_path / "evil" / "model.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run = tmp_path / "run"
    untrusted_files._write_checkpoint(run / "checkpoint")
    source = step_folder(run / "checkpoint", 10)
    found = manifest.read(source)
    found.numbers["config"]["model"]["name"] = "evil.model"
    manifest.write(source, found)
    config = Config.model_validate({"model": {"name": "evil.model"}, "training": {"global_batch_size": 8}})
    (run / "config.toml").write_text(to_toml(config))
    return run


def _ended(monkeypatch, capsys, *words: str) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["titanlite", *words])
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("export-hf --checkpoint run --output out", 2),
        ("replay run --step 3", 2),
        ("checkpoint show run", 0),
    ],
)
def test_a_command_that_opens_a_checkpoint_imports_no_module_that_it_names(forged, monkeypatch, capsys, words, code):
    found, said = _ended(monkeypatch, capsys, *words.split())
    assert found == code, said
    if code:
        assert "its model is 'evil.model', not a family of models/" in said and "--model" in said
    _nothing_was_imported(forged)


def test_generate_eval_and_a_resume_import_no_module_that_a_checkpoint_names(forged):
    source, config = step_folder(forged / "checkpoint", 10), Config()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"evil\.model"):
            open_model(source, torch.device("cpu"))
        setting = RunIdentity(config, family_of(config.model), data_of([range(3000)], config, 4096), 8)
        with pytest.raises(UserError, match="step-00000010: "):
            load_run(source, load.verified(source), setting, {})
    finally:
        dist.destroy_process_group()
    _nothing_was_imported(forged)


def _nothing_was_imported(run: Path) -> None:
    assert not (run.parent / "imported").exists()
    assert "evil" not in sys.modules and str(run.parent) not in sys.path


def test_a_module_that_the_command_names_is_imported(forged, monkeypatch, capsys):
    code, said = _ended(monkeypatch, capsys, *["export-hf", "--checkpoint", "run", "--output", "out", "--model", "evil.model"])
    assert code == 2 and "lacks Config" in said
    assert (forged.parent / "imported").exists()
    del sys.modules["evil"], sys.modules["evil.model"]
