"""Compiles noop_cuda.cpp against the PyTorch that is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("noop_cuda.cpp")


def why_not() -> str:
    """Why the shim cannot be built here; empty if it can."""
    if torch.backends.cuda.is_built():
        return "the shim is for a CPU build of PyTorch; this one has CUDA"
    return "" if shutil.which("g++") else "the shim needs g++, which is not installed"


def build(folder: Path) -> dict[str, str]:
    """Compiles the shim into `folder`, in seconds; returns the environment of a process that has it."""
    root, library = Path(torch.__file__).parent, folder / "noop_cuda.so"
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *includes, str(SOURCE), *libraries, "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {**os.environ, "LD_PRELOAD": str(library)}
