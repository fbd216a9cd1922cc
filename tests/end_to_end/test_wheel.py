"""The wheel has every module, and trains in an environment and a folder without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.forked import prepare
from tests.end_to_end.launcher import ROOT
from tests.end_to_end.test_run_train import reports
from tests.waiting import PATIENCE


def run(*command: str | Path, folder: Path) -> str:
    """Standard output of a command that must succeed, in an environment without references to the repository."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves folders next to the sources."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in ("titanlite", "models"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", output, source, folder=output)
    return next(output.glob("titanlite-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; the dependencies are those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    # Python does not read the .pth files in a folder that a .pth file adds, so an editable titanlite there is not found.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, folder=folder)
    return folder


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {
        file.relative_to(ROOT).as_posix()
        for package in ("titanlite", "models")
        for kind in ("*.py", "*.toml")
        for file in (ROOT / package).rglob(kind)
    }


@pytest.mark.slow
def test_the_installed_wheel_trains_outside_of_the_repository(environment, tmp_path):
    prepare(tmp_path, "llama3", "debug", training={"steps": 3, "local_batch_size": 1}, lr_scheduler={"warmup_steps": 0})
    imported = run(environment / "bin" / "python", "-c", "import titanlite; print(titanlite.__file__)", folder=tmp_path)
    assert Path(imported.strip()).is_relative_to(environment)
    run(environment / "bin" / "titanlite", "launch", "run.toml", folder=tmp_path)
    found = reports(tmp_path / "out")
    assert [report["step"] for report in found] == [1, 2, 3]
    assert found[-1]["loss"] < found[0]["loss"]
